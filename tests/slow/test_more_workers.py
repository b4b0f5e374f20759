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
    return {count: run_workers(folder, count, cases) for count, cases in of_count.items()}


@pytest.mark.parametrize(
    ("count", "case"), [(2, case) for case in CASES] + [(3, case) for case in FEW]
)
def test_metrics_and_weights_agree_with_one_worker(
    outcomes: dict[int, dict[Any, Any]], count: int, case: tuple[str, int]
):
    assert_agrees_with_one_worker(outcomes, count, case)


@pytest.mark.parametrize("critic_workers", [0, 1])
def test_workers_that_were_moved_to_the_host_learn_what_others_learn_bit_for_bit(
    tmp_path: Path, critic_workers: int
):
    """Two workers of both models, or one of the policy beside one of the critic."""
    tiny_policy(tmp_path / "policy")
    moved, stayed = (
        run_workers(tmp_path, 2, CASES, moves=moves, critic_workers=critic_workers)
        for moves in (True, False)
    )
    for case in CASES:
        assert moved[case]["figures"] == stayed[case]["figures"], case
        for name, weight in stayed[case]["weights"].items():
            assert torch.equal(moved[case]["weights"][name], weight), (case, name)


def test_optimizers_that_the_config_off_loads_learn_the_same_on_two_workers(
    outcomes: dict[int, dict[Any, Any]], tmp_path: Path
):
    """With gradients that are summed meanwhile, as on GPUs."""
    tiny_policy(tmp_path / "policy")
    zero = {"offload_optimizer": {"device": "cpu"}}
    cases = [("float32", 2), ("float32", 3)]
    found = run_workers(tmp_path, 2, cases, zero=zero, moves=False)
    for case in cases:
        for name, weight in outcomes[2][case]["weights"].items():
            assert (found[case]["weights"][name] - weight).abs().max() < 1e-5, (case, name)


def test_of_three_each_is_fed_its_share_of_tokens(outcomes: dict[int, dict[Any, Any]]):
    assert_fed_alike(outcomes[3]["float32", 0]["tokens"])
