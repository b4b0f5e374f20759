"""Ray Tune around a trainer, as a user of Ray writes it, without `raypo sweep`."""

from pathlib import Path
from typing import Any

import pytest
import ray
from ray import tune
from ray.train import RunConfig
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler
from ray.util.state import list_actors

from raypo import SFTConfig, SFTTrainer
from tests.integration.pipeline import sft_values, write_examples

pytestmark = pytest.mark.usefixtures("local_ray")


def test_a_trial_that_asha_stops_leaves_its_room_to_the_next_one(tmp_path: Path):
    """Tune kills the trial's process, so nothing in it can give back its placement group."""
    write_examples(tmp_path)
    values = sft_values(tmp_path) | {"num_steps": 40, "placement": {"timeout_s": 60.0}}
    del values["eval"]["function"]
    values["learner"] = values.get("learner", {}) | {
        "num_workers": 1,
        "cpus_per_worker": int(ray.cluster_resources()["CPU"]),
    }

    def trial(config: dict[str, Any]) -> None:
        name = tune.get_context().get_trial_id()
        assert name is not None
        learner = values["learner"] | {"lr": config["lr"]}
        run = SFTConfig.parse(values | {"name": name, "learner": learner})
        SFTTrainer(run, run_config=RunConfig(callbacks=[TuneReportCallback()])).fit()

    results = tune.Tuner(
        tune.with_resources(trial, tune.PlacementGroupFactory([{"memory": 1}])),
        param_space={"lr": tune.grid_search([1e-3, 1e-4])},
        tune_config=tune.TuneConfig(
            metric="train/loss",
            mode="min",
            scheduler=ASHAScheduler(time_attr="step", max_t=2, grace_period=1),
            max_concurrent_trials=1,
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    ).fit()
    assert [result.error for result in results] == [None, None]
    assert all((result.metrics or {})["step"] >= 1 for result in results)
    alive: list[Any] = list_actors(filters=[("state", "=", "ALIVE")])
    left = [actor.class_name for actor in alive]
    assert "PlacementGroupCleaner" not in left
