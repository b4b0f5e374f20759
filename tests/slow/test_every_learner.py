"""Every learner that a GPU run can have, with the DeepSpeed config that it would get there.

Each recipe x ZeRO stage x dtype x off-load by DeepSpeed, on one and two workers, policy and critic
together and apart, on gloo. Two equal learners make two steps; before each of them one is moved to
the host and back, which may change no byte.
"""

from typing import Any

import pytest

from tests.integration.recipe_learners import KINDS, OFF_LOADS, Case
from tests.integration.test_workers import assert_agrees_with_one_worker, run_workers, together
from tests.tiny import tiny_policy

LOWEST = {"none": 0, "optimizer": 1, "both": 3}
"""Lowest stage at which DeepSpeed can off-load."""
MATRIX = [
    Case(kind, dtype, stage, off_load)
    for kind in (*KINDS, "ppo", "apart")
    for dtype in ("float32", "bfloat16")
    for stage in range(4)
    for off_load in OFF_LOADS
    if stage >= LOWEST[off_load]
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("workers")
    tiny_policy(folder / "policy")
    alone = [case for case in MATRIX if case.kind != "apart"]
    return {
        count: run_workers(folder, count, [], matrix=cases)
        for count, cases in ((1, alone), (2, MATRIX))
    }


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_two_workers_learn_what_one_learns(outcomes: dict[int, dict[Any, Any]], case: Case):
    one = outcomes[1][together([case])[0]]
    assert_agrees_with_one_worker(
        one, outcomes[2][case], case.dtype, case.stage, apart=case.kind == "apart"
    )


@pytest.mark.parametrize("case", [case for case in MATRIX if case.off_load != "none"], ids=str)
def test_an_off_load_by_deepspeed_learns_the_same(outcomes: dict[int, dict[Any, Any]], case: Case):
    plain, off = (outcomes[2][each] for each in (case._replace(off_load="none"), case))
    bound = 1e-5 if case.dtype == "float32" else 2e-3
    for name, weight in plain["weights"].items():
        assert (off["weights"][name] - weight).abs().max() <= bound, name
