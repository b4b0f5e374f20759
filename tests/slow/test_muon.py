"""Muon on several workers: a step and a resumed one are those of one worker, at every stage."""

from typing import Any

import pytest

from tests.integration.test_workers import assert_agrees_with_one_worker, run_workers
from tests.tiny import tiny_policy

CASES = [("float32", 0), ("float32", 1), ("float32", 2), ("float32", 3)]
CASES += [("bfloat16", 0), ("bfloat16", 2), ("bfloat16", 3)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("muon")
    tiny_policy(folder / "policy")
    (folder / "checkpoints").mkdir()
    more: dict[str, Any] = {
        "learner": {"optimizer": "muon", "weight_decay": 0.1},
        "checkpoints": str(folder / "checkpoints"),
    }
    return {count: run_workers(folder, count, CASES, **more) for count in (1, 2)}


@pytest.mark.parametrize("case", CASES)
def test_two_workers_agree_with_one_also_after_a_resume(
    outcomes: dict[int, dict[Any, Any]], case: tuple[str, int]
):
    one, two = outcomes[1][case], outcomes[2][case]
    assert_agrees_with_one_worker(one, two, *case)
    assert_agrees_with_one_worker(one["second"], two["second"], *case)
