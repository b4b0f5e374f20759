"""A step under DeepSpeed does not depend on the number of workers: all stages, up to three."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.test_workers import (
    assert_agrees_with_one_worker,
    assert_fed_alike,
    run_workers,
)
from tests.tiny import tiny_policy

CASES = [(dtype, stage) for dtype in ("float32", "bfloat16") for stage in range(4)]
FEW = [("float32", 0), ("float32", 3)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("workers")
    tiny_policy(folder / "policy")
    of_count = {1: CASES, 2: CASES, 3: FEW}
    resume = {
        3: [(f"{dtype}_{stage}_2", dtype, 3 - stage) for dtype, stage in CASES],
    }
    return {
        count: run_workers(
            folder, count, cases, checkpoints=str(folder), resume=resume.get(count, [])
        )
        for count, cases in of_count.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_three_workers_go_on_at_another_stage_where_two_were(
    outcomes: dict[int, dict[Any, Any]], case: tuple[str, int]
):
    dtype, stage = case
    found = outcomes[3][f"{dtype}_{stage}_2"]
    assert_agrees_with_one_worker(outcomes[1][case]["second"], found, dtype, 3 - stage)


@pytest.mark.parametrize(
    ("count", "case"), [(2, case) for case in CASES] + [(3, case) for case in FEW]
)
def test_metrics_and_weights_agree_with_one_worker(
    outcomes: dict[int, dict[Any, Any]], count: int, case: tuple[str, int]
):
    assert_agrees_with_one_worker(outcomes[1][case], outcomes[count][case], *case)


def test_of_three_each_is_fed_its_share_of_tokens(outcomes: dict[int, dict[Any, Any]]):
    assert_fed_alike(outcomes[3]["float32", 0]["tokens"])


def test_overlapping_the_reduction_of_gradients_changes_no_bit(tmp_path: Path):
    """DeepSpeed fills two buckets in turn. On GPUs: tests/gpu/test_several_gpus.py."""
    tiny_policy(tmp_path / "policy")
    cases = [("float32", 2), ("bfloat16", 2)]
    in_order = {"deepspeed": {"zero_optimization": {"overlap_comm": False}}}
    overlapped = run_workers(tmp_path, 2, cases)
    plain = run_workers(tmp_path, 2, cases, learner=in_order)
    for case in cases:
        assert overlapped[case]["overlaps"]
        assert not plain[case]["overlaps"]
        assert overlapped[case]["figures"] == plain[case]["figures"]
        for name, weight in plain[case]["weights"].items():
            assert torch.equal(overlapped[case]["weights"][name], weight), name
