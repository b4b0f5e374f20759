"""What an update went wrong with can be looked at."""

from types import SimpleNamespace
from typing import Any

import pytest

from raypo.collectives import Workers
from raypo.learner.roles import Roles
from raypo.learner.state import NonFiniteUpdateError
from raypo.run.ppo_run import PPORun
from raypo.run.rollout_metrics import speed_metrics
from tests.unit.run.test_rejection_sampling import SAMPLES


def test_samples_of_an_update_that_fails_are_written():
    written: list[tuple[int, list[dict[str, Any]]]] = []
    run: Any = SimpleNamespace(
        _write_rollouts=lambda step, rows, workers: written.append((step, rows())),
        roles=Roles.shared(Workers()),
        workers=Workers(),
    )
    with PPORun.keeping(run, 3, SAMPLES):
        pass
    assert written == []
    with pytest.raises(NonFiniteUpdateError), PPORun.keeping(run, 3, SAMPLES):
        raise NonFiniteUpdateError("too many")
    ((step, rows),) = written
    assert step == 3
    assert [row["response"] for row in rows] == [each.rollout.response for each in SAMPLES]


def test_samples_per_second_are_those_sampled_where_any_are():
    learned = {"train/examples": 32.0}
    assert speed_metrics(learned, 2.0)["perf/samples_per_s"] == 16.0
    both = learned | {"rollout/samples_sampled": 128.0}
    assert speed_metrics(both, 2.0)["perf/samples_per_s"] == 64.0
