"""What an update went wrong with can be looked at."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.train import Checkpoint, CheckpointConfig
from ray.train._internal.checkpoint_manager import _CheckpointManager
from ray.train._internal.session import _TrainingResult

from raypo.collectives import Workers
from raypo.learner.roles import Roles
from raypo.learner.state import NonFiniteUpdateError
from raypo.run.ppo_run import PPORun
from raypo.run.rollout_metrics import speed_metrics
from raypo.run.run import report_for_ray
from tests.unit.run.test_rejection_sampling import SAMPLES


def test_samples_of_an_update_that_fails_are_written():
    written: list[tuple[int, list[dict[str, Any]]]] = []
    run: Any = SimpleNamespace(
        _write_rollouts=lambda step, rows: written.append((step, rows)),
        roles=Roles.shared(Workers()),
    )
    with PPORun.keeping(run, 3, SAMPLES):
        pass
    assert written == []
    with pytest.raises(NonFiniteUpdateError), PPORun.keeping(run, 3, SAMPLES):
        raise NonFiniteUpdateError("too many")
    ((step, rows),) = written
    assert step == 3
    assert [row["response"] for row in rows] == [each.rollout.response for each in SAMPLES]


@pytest.mark.parametrize(
    ("mode", "values", "best"), [("min", [0.2, 0.9], 1), ("max", [0.9, 0.2], 1)]
)
def test_a_checkpoint_of_a_step_that_did_not_measure_the_score_does_not_oust_the_best(
    mode: Any, values: list[float], best: int, tmp_path: Path
):
    """Ray Train's own ranking: held-out prompts are evaluated more seldom than the state is saved."""
    kept = CheckpointConfig(
        num_to_keep=1, checkpoint_score_attribute="eval/x", checkpoint_score_order=mode
    )
    manager = _CheckpointManager(kept)
    measured: list[dict[str, float]] = [{"eval/x": values[0]}, {}, {"eval/x": values[1]}, {}]
    for step, metrics in enumerate(measured, start=1):
        (tmp_path / str(step)).mkdir()
        report = report_for_ray(step, metrics, "eval/x")
        checkpoint = Checkpoint.from_directory(str(tmp_path / str(step)))
        manager.register_checkpoint(_TrainingResult(checkpoint, report))
    left = sorted(int(folder.name) for folder in tmp_path.iterdir())
    assert left == [best, 4], "the best, and the newest to go on from"


def test_samples_per_second_are_those_sampled_where_any_are():
    learned = {"train/examples": 32.0}
    assert speed_metrics(learned, 2.0)["perf/samples_per_s"] == 16.0
    both = learned | {"rollout/samples_sampled": 128.0}
    assert speed_metrics(both, 2.0)["perf/samples_per_s"] == 64.0
