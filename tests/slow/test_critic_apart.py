"""A critic on workers of its own learns the same, whichever stage and dtype; real gloo."""

from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_workers import assert_learns_the_same, train_apart

CASES = [("float32", 2), ("float32", 3), ("bfloat16", 2), ("bfloat16", 3)]
TEAMS = [(3, 1), (3, 2)]


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[Any, Any]]:
    folder: Path = tmp_path_factory.mktemp("apart")
    return train_apart(folder, CASES, *TEAMS)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("workers", TEAMS)
def test_a_critic_on_workers_of_its_own_learns_the_same(
    apart: dict[tuple[int, int], dict[Any, Any]], workers: tuple[int, int], case: tuple[str, int]
):
    one, two = apart[1, 0][case], apart[workers][case]
    exact = case[0] == "float32"
    assert_learns_the_same(one, two, exact=exact)
    assert_learns_the_same(one["second"], two["second"], exact=exact)
