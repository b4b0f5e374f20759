"""A critic on workers of its own learns the same, whichever stage and dtype; real gloo."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_workers import LR, run_workers
from tests.tiny import tiny_policy

CASES = [("float32", 0), ("float32", 2), ("float32", 3), ("bfloat16", 2), ("bfloat16", 3)]
TEAMS = [(3, 1), (3, 2)]
RESUMED = [("float32", 2, 3), ("bfloat16", 3, 2)]
"""dtype, and ZeRO stage before, on one worker, and after, on three of which one has the critic."""


def assert_learns_the_same(one: dict[str, Any], two: dict[str, Any], *, exact: bool) -> None:
    """Figures and weights of a step, up to rounding."""
    assert two["figures"].keys() <= one["figures"].keys()
    for name, value in two["figures"].items():
        close = pytest.approx(
            one["figures"][name],
            rel=1e-3 if exact else 0.1,
            abs=1e-4 if exact else 0.05,
            nan_ok=True,
        )
        assert value == close, name
    difference = max(float((two["weights"][n] - w).abs().max()) for n, w in one["weights"].items())
    assert difference <= (0.2 * LR if exact else 20 * LR)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[Any, Any]]:
    """(workers, those of only the critic) -> two steps, the second from the first's checkpoint."""
    folder: Path = tmp_path_factory.mktemp("apart")
    tiny_policy(folder / "policy")
    more = {"checkpoints": str(folder)}
    resume = [(f"{dtype}_{before}_1", dtype, after) for dtype, before, after in RESUMED]
    return {
        (count, critics): run_workers(
            folder,
            count,
            CASES,
            critic_workers=critics,
            resume=resume if (count, critics) == (3, 1) else [],
            **more,
        )
        for count, critics in ((1, 0), *TEAMS)
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("workers", TEAMS)
def test_a_critic_on_workers_of_its_own_learns_the_same(
    apart: dict[tuple[int, int], dict[Any, Any]], workers: tuple[int, int], case: tuple[str, int]
):
    one, two = apart[1, 0][case], apart[workers][case]
    exact = case[0] == "float32"
    assert_learns_the_same(one, two, exact=exact)
    assert_learns_the_same(one["second"], two["second"], exact=exact)


@pytest.mark.parametrize(("dtype", "before", "after"), RESUMED)
def test_the_state_of_one_worker_goes_on_with_a_critic_apart(
    apart: dict[tuple[int, int], dict[Any, Any]], dtype: str, before: int, after: int
):
    one, two = apart[1, 0][dtype, before]["second"], apart[3, 1][f"{dtype}_{before}_1"]
    assert_learns_the_same(one, two, exact=dtype == "float32")


def test_each_team_is_dealt_every_token(apart: dict[tuple[int, int], dict[Any, Any]]):
    (whole,) = apart[1, 0]["float32", 0]["tokens"]
    first, second, critic = apart[3, 1]["float32", 0]["tokens"]
    assert first + second == critic == whole
