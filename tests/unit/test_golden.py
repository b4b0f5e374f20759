"""No number of an update moves unnoticed: plain torch, float64, rollouts made by hand."""

import pytest

from tests.golden.recorded import LEARNER_STEP, SECTIONS, differences, learner_steps, read


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    return learner_steps()


@pytest.mark.parametrize("name", SECTIONS)
def test_an_update_gives_the_recorded_figures(name: str, found: dict[str, dict[str, float]]):
    golden = read(LEARNER_STEP)
    moved = differences(found[name], golden[name], golden["tolerances"])
    assert not moved, f"renewed by: {golden['renewed_by']}"
