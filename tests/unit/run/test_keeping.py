"""What an update went wrong with can be looked at."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from ray.train import Checkpoint
from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.training_report import _TrainingReport

from raypo.cluster.run_monitor import MonitorClient
from raypo.collectives import Workers
from raypo.config import CheckpointSection, PPOConfig
from raypo.learner.state import NonFiniteUpdateError
from raypo.run.records import Records, report_for_ray
from raypo.run.rollout_metrics import speed_metrics
from raypo.run.run import Run
from raypo.run.setup import Runtime
from raypo.storage.run_files import RunFiles
from raypo.trainer.settings import run_config_of
from tests.unit.run.test_rejection_sampling import SAMPLES


def records_in(folder: Path) -> Records:
    runtime = Runtime("run", str(folder), str(folder))
    config = PPOConfig.parse({"name": "run", "model": {"policy": "p"}, "data": {"prompts": "d"}})
    return Records(
        Run(config, runtime, Workers(), RunFiles(str(folder), "run"), MonitorClient(None))
    )


def test_samples_of_an_update_that_fails_are_written(tmp_path: Path):
    records = records_in(tmp_path)
    files = RunFiles(str(tmp_path), "run")
    with records.keeping(3, SAMPLES):
        pass
    assert files.rollouts(3) == []
    with pytest.raises(NonFiniteUpdateError), records.keeping(3, SAMPLES):
        raise NonFiniteUpdateError("too many")
    rows = files.rollouts(3)
    assert [row["response"] for row in rows] == [each.response for each in SAMPLES]


@pytest.mark.parametrize(("mode", "values"), [("min", [0.2, 0.9]), ("max", [0.9, 0.2])])
@pytest.mark.parametrize("unmeasured", [{}, {"eval/x": math.nan}])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_checkpoint_without_a_score_neither_ousts_the_best_nor_breaks_a_resume(
    mode: Any, values: list[float], unmeasured: dict[str, float], tmp_path: Path
):
    """Ray Train ranks; held-out prompts may be evaluated more seldom than the state is saved."""
    section = CheckpointSection(best_by="eval/x", best_mode=mode, keep=1)
    config = PPOConfig.parse(
        {"name": "run", "model": {"policy": "p"}, "data": {"prompts": "d"}}
    ).model_copy(update={"checkpoint": section})
    kept = run_config_of(config, None).checkpoint_config
    assert kept is not None
    storage = StorageContext(str(tmp_path), "run")
    measured = [{"eval/x": values[0]}, unmeasured, {"eval/x": values[1]}, unmeasured]

    async def save(steps: list[int]) -> None:  # each call is a controller of its own
        manager = CheckpointManager(kept, storage)  # type: ignore[arg-type]
        for step in steps:
            folder = tmp_path / "run" / f"checkpoint_{step}"
            folder.mkdir(parents=True)
            report = report_for_ray(step, measured[step - 1], section)
            saved = Checkpoint(str(folder), storage.storage_filesystem)
            manager.register_checkpoint(_TrainingReport(saved, report, False))

    asyncio.run(save([1, 2]))
    asyncio.run(save([3, 4]))
    left = sorted(folder.name for folder in (tmp_path / "run").glob("checkpoint_?"))
    assert left == ["checkpoint_1", "checkpoint_4"], "the best, and the newest to go on from"


def test_samples_per_second_are_those_sampled_where_any_are():
    learned = {"train/examples": 32.0}
    assert speed_metrics(learned, 2.0)["perf/samples_per_s"] == 16.0
    both = learned | {"rollout/samples_sampled": 128.0}
    assert speed_metrics(both, 2.0)["perf/samples_per_s"] == 64.0
