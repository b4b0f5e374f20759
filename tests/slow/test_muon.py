"""Muon on several workers: a step and a resumed one are those of one worker, at every stage."""

from typing import Any

import pytest

from tests.integration.test_workers import assert_agrees_with_one_worker, run_workers
from tests.tiny import tiny_policy

CASES = [("float32", 0), ("float32", 1), ("float32", 2), ("float32", 3)]
CASES += [("bfloat16", 0), ("bfloat16", 2), ("bfloat16", 3)]
RESUMED = [
    ("float32_0_1", "float32", 2),
    ("float32_2_1", "float32", 3),
    ("float32_3_1", "float32", 1),
]
"""Checkpoints of one worker that two workers read, and their ZeRO stage."""
OF_TWO = [
    ("float32_2_2", "float32", 3),
    ("float32_3_2", "float32", 0),
    ("bfloat16_2_2", "bfloat16", 3),
]
"""Checkpoints of two workers that one worker reads, and its ZeRO stage."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("muon")
    tiny_policy(folder / "policy")
    (folder / "checkpoints").mkdir()
    more: dict[str, Any] = {
        "learner": {"optimizer": "muon", "weight_decay": 0.1},
        "checkpoints": str(folder / "checkpoints"),
    }
    one = run_workers(folder, 1, CASES, **more)
    two = run_workers(folder, 2, CASES, resume=RESUMED, **more)
    return {1: one, 2: two, 3: run_workers(folder, 1, [], resume=OF_TWO, **more)}


@pytest.mark.parametrize("case", CASES)
def test_two_workers_agree_with_one_also_after_a_resume(
    outcomes: dict[int, dict[Any, Any]], case: tuple[str, int]
):
    one, two = outcomes[1][case], outcomes[2][case]
    assert_agrees_with_one_worker(one, two, *case)
    assert_agrees_with_one_worker(one["second"], two["second"], *case)


@pytest.mark.parametrize(("name", "dtype", "stage"), RESUMED)
def test_two_workers_go_on_from_a_checkpoint_of_one_at_another_stage(
    outcomes: dict[int, dict[Any, Any]], name: str, dtype: str, stage: int
):
    one = outcomes[1][dtype, int(name.split("_")[1])]["second"]
    assert_agrees_with_one_worker(one, outcomes[2][name], dtype, stage)


@pytest.mark.parametrize(("name", "dtype", "stage"), OF_TWO)
def test_one_worker_goes_on_from_a_checkpoint_of_two(
    outcomes: dict[int, dict[Any, Any]], name: str, dtype: str, stage: int
):
    two = outcomes[2][dtype, int(name.split("_")[1])]["second"]
    assert_agrees_with_one_worker(outcomes[3][name], two, dtype, stage)
