"""Rollouts of the next step, sampled while the learner updates."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integration.task import read_metrics
from tests.integration.test_ahead import prompts, run, trained

pytestmark = pytest.mark.usefixtures("local_ray")


def test_one_step_off_trains_the_same_prompts_one_version_later(first: SimpleNamespace, task: Path):
    folder = run(task, "one_step_off", mode="one_step_off")
    metrics = read_metrics(folder)
    staleness = [(row["rollout/staleness_mean"], row["rollout/staleness_max"]) for row in metrics]
    assert staleness == [(0.0, 0.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0)]
    assert prompts(folder) == prompts(first.folder)
    assert trained(metrics)[0] == trained(first.metrics)[0]
