"""A run that its rules have stopped is made longer, and has the numbers of one that never was."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integration.task import numbers
from tests.integration.test_goes_on import run

pytestmark = pytest.mark.usefixtures("local_ray")


def test_a_run_that_was_stopped_and_lengthened_is_the_one_that_never_was(
    first: SimpleNamespace, task: Path
):
    rules = {"stop.metric": "rollout/score_mean", "stop.at": -1.0}
    rows, ended = run(task, "longer", num_steps=3, **rules)
    summary = json.loads((task.parent / "runs" / "longer" / "summary.json").read_text())
    assert len(rows) == 1
    assert ended == {"status": "finished", "step": 1}
    assert "at least -1 (stop.at)" in summary["stopped"]

    again, _ = run(task, "longer", num_steps=3, **rules)
    assert again == rows  # it is done by its rules

    rows, ended = run(task, "longer", **{"stop.after_s": 0.1})
    assert ended == {"status": "interrupted", "step": 1}  # no step is begun after its time
    assert len(rows) == 1

    rows, ended = run(task, "longer")
    assert ended == {"status": "finished", "step": 4}
    assert numbers(rows) == numbers(first.metrics)
