"""No number of a run moves unnoticed: real Ray Train, vLLM and DeepSpeed, the first two steps.

A run samples, and on another processor the engine rounds otherwise: once in a long while another
token comes out. So a step is compared where its tokens and those of the steps before are the
recorded ones. A few other responses leave nothing to compare; many of them are no rounding.
"""

from pathlib import Path

import pytest

from tests.golden.recorded import OVERRIDES, RUNS, differences, read, run

pytestmark = pytest.mark.usefixtures("local_ray")

MOST_OTHER_RESPONSES = 0.1
"""Share of a step's responses that may differ by rounding."""


@pytest.mark.parametrize("name", OVERRIDES)
def test_the_first_steps_of_a_run_give_the_recorded_figures(name: str, task: Path):
    golden = read(RUNS)
    steps = run(task, name)
    assert len(steps) == len(golden[name])
    for number, (found, expected) in enumerate(zip(steps, golden[name], strict=True), 1):
        pairs = list(zip(found["responses"], expected["responses"], strict=True))
        other = sum(mine != recorded for mine, recorded in pairs)
        if other:
            assert other <= MOST_OTHER_RESPONSES * len(pairs), f"step {number} samples otherwise"
            pytest.skip(f"step {number}: {other} of {len(pairs)} responses are rounded otherwise")
        moved = differences(found["figures"], expected["figures"], golden["tolerances"])
        assert not moved, f"step {number}; renewed by: {golden['renewed_by']}"
