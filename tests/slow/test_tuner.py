"""Ray Tune around runs as a user of Ray writes it, by `raypo.Tuner` and without it."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray import tune
from ray.train import RunConfig
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining
from ray.tune.search.optuna import OptunaSearch
from ray.util.state import list_actors
from transformers import AutoModelForCausalLM

from raypo import PPOConfig, PPOTrainer, Rollout, SFTConfig, SFTTrainer, Tuner
from raypo.config import parse_run_config
from raypo.run.callbacks import StepView
from raypo.storage.checkpoints import STATE
from raypo.trainer import trainer_for
from tests.integration.pipeline import (
    dpo_values,
    reward_model_values,
    rounds_values,
    sft_values,
    write_examples,
)
from tests.integration.task import REPOSITORY, numbers, own_ray, read_metrics, wait_for_steps
from tests.tiny import tiny_policy


def alive_names() -> list[str]:
    alive: list[Any] = list_actors(own_ray(), filters=[("state", "=", "ALIVE")], limit=1000)
    return [actor.name or actor.class_name for actor in alive]


def test_a_trial_that_asha_stops_leaves_its_room_to_the_next_one(tmp_path: Path, local_ray: None):
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
        param_space={"lr": tune.loguniform(1e-4, 1e-3)},
        tune_config=tune.TuneConfig(
            metric="train/loss",
            mode="min",
            num_samples=2,
            search_alg=OptunaSearch(seed=0),
            scheduler=ASHAScheduler(time_attr="step", max_t=2, grace_period=1),
            max_concurrent_trials=1,
        ),
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune"), verbose=0),
    ).fit()
    assert [result.error for result in results] == [None, None]
    assert all((result.metrics or {})["step"] >= 1 for result in results)
    assert "PlacementGroupCleaner" not in alive_names()


def digits(rollouts: list[Rollout]) -> list[float]:
    return [float(sum(c.isdigit() for c in each.response)) for each in rollouts]


def half_step(view: StepView) -> dict[str, float]:
    return {"half_step": view.step / 2}


class Watched(tune.Callback):
    """Names of what lives while trials run, and the trials' reports."""

    def __init__(self) -> None:
        self.names, self.reports = set[str](), dict[str, list[dict[str, Any]]]()

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict, **_: Any
    ) -> None:
        self.names |= set(alive_names())
        self.reports.setdefault(str(trial), []).append(dict(result))


def test_trials_share_engines_and_are_the_runs_that_they_would_be_alone(
    task: Path, local_ray: None
):
    """Optuna proposes, ASHA stops; the reward function and the callback are Python's."""
    base = PPOConfig.load(task, overrides={"num_steps": 4, "name": "tuned"})
    trainer = PPOTrainer(base, reward_funcs=digits, callbacks=[half_step])
    before, watched = set(alive_names()), Watched()
    results = Tuner(
        trainer,
        param_space={"learner": {"policy_lr": tune.loguniform(1e-4, 1e-2)}},
        tune_config=tune.TuneConfig(
            metric="eval/score_mean",
            mode="max",
            num_samples=3,
            search_alg=OptunaSearch(seed=0),
            scheduler=ASHAScheduler(time_attr="step", max_t=4, grace_period=2, reduction_factor=2),
        ),
        run_config=tune.RunConfig(name="shared", callbacks=[watched], verbose=0),
    ).fit()
    assert not results.errors
    assert {name for name in watched.names if ":reference:" in name} == {
        "raypo:shared-shared:reference:0"
    }
    assert not any(":engine:" in name and "-lent-" not in name for name in watched.names)
    assert set(alive_names()) <= before

    best = results.get_best_result()
    assert best.metrics is not None
    assert best.metrics["half_step"] == best.metrics["step"] / 2
    assert best.metrics_dataframe is not None
    assert list(best.metrics_dataframe["step"]) == [1, 2, 3, 4]
    AutoModelForCausalLM.from_pretrained(Path(best.path) / "policy")
    assert best.checkpoint is not None
    kept = Path(best.checkpoint.path)
    assert (kept / STATE).exists()
    assert "policy/" in (kept / "README.txt").read_text()

    lr = best.metrics["config"]["learner"]["policy_lr"]
    values: dict[str, Any] = base.model_dump() | {"name": "tuned-alone"}
    values["learner"]["policy_lr"] = lr
    PPOTrainer(PPOConfig.parse(values), reward_funcs=digits, callbacks=[half_step]).fit()
    alone = read_metrics(Path(base.storage_path) / "tuned-alone")
    assert numbers(alone) == numbers(read_metrics(Path(best.path)))


RECIPES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "dpo": dpo_values,
    "reward_model": reward_model_values,
    "rejection_sampling": lambda folder: rounds_values(folder, "rejection_sampling"),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe(recipe: str, tmp_path: Path, local_ray: None):
    write_examples(tmp_path)
    values: dict[str, Any] = RECIPES[recipe](tmp_path) | {"num_steps": 2}
    values["eval"]["every"] = values["checkpoint"]["every"] = 1
    results = Tuner(
        values,
        param_space={"learner.lr": tune.grid_search([1e-4, 5e-3])},
        run_config=tune.RunConfig(name="all", stop={"step": 1}, verbose=0),
    ).fit()
    assert [result.error for result in results] == [None, None]
    assert all((result.metrics or {})["step"] == 1 for result in results)
    paths = [Path(results[row].path) for row in range(2)]
    configs = [yaml.safe_load((path / "config.yaml").read_text()) for path in paths]
    assert [config["learner"]["lr"] for config in configs] == [1e-4, 5e-3]


@pytest.mark.parametrize("recipe", ["distillation", "iterative_dpo"])
def test_trials_of_rounds_share_their_frozen_model(recipe: str, tmp_path: Path, local_ray: None):
    """The second trial is the run that it would be alone."""
    write_examples(tmp_path)
    values: dict[str, Any] = rounds_values(tmp_path, recipe) | {"num_steps": 2}
    if recipe == "distillation":
        values["model"]["teacher"] = str(tiny_policy(tmp_path / "teacher", seed=1))
    else:
        values["iterative_dpo"] = {"reference": "start"}
    watched = Watched()
    results = Tuner(
        values,
        param_space={"learner.lr": tune.grid_search([1e-4, 5e-3])},
        tune_config=tune.TuneConfig(metric="eval/score_mean", mode="max", max_concurrent_trials=1),
        run_config=tune.RunConfig(name="rounds", callbacks=[watched], verbose=0),
    ).fit()
    assert not results.errors
    assert {name for name in watched.names if ":reference:" in name} == {
        "raypo:rounds-shared:reference:0"
    }
    values["learner"]["lr"] = 5e-3
    trainer_for(parse_run_config(values, origin="alone")).fit()
    alone = numbers(read_metrics(tmp_path / "runs" / recipe))
    assert numbers(read_metrics(Path(results[1].path))) == alone
    assert numbers(read_metrics(Path(results[0].path))) != alone


def test_rays_population_based_training(tmp_path: Path, local_ray: None):
    """The worse trial goes on from the better one's checkpoint, with another learning rate."""
    write_examples(tmp_path)
    values: dict[str, Any] = sft_values(tmp_path) | {"num_steps": 4}
    del values["eval"]["function"]
    values["eval"]["every"] = values["checkpoint"]["every"] = 2
    watched = Watched()
    results = Tuner(
        values,
        param_space={"learner.lr": tune.grid_search([1e-6, 5e-3])},
        tune_config=tune.TuneConfig(
            metric="eval/loss",
            mode="min",
            scheduler=PopulationBasedTraining(
                time_attr="step",
                perturbation_interval=2,
                quantile_fraction=0.5,
                hyperparam_mutations={"learner.lr": tune.loguniform(1e-6, 1e-2)},
                resample_probability=0.0,  # near the better trial's rate, which learns
                synch=True,
            ),
        ),
        run_config=tune.RunConfig(name="population", callbacks=[watched], verbose=0),
    ).fit()
    assert not results.errors
    worse, better = (watched.reports[name] for name in sorted(watched.reports))
    assert worse[-1]["step"] == better[-1]["step"] == 4
    assert worse[0]["step"] == better[0]["step"] == 2
    assert worse[0]["eval/loss"] > better[0]["eval/loss"] > worse[-1]["eval/loss"]
    assert worse[-1]["config"]["learner.lr"] != 1e-6
    for row in range(2):
        checkpoint = results[row].checkpoint
        assert checkpoint is not None
        assert json.loads((Path(checkpoint.path) / STATE).read_text())["step"] == 4


RATES = """
import sys
from ray import tune
from ray.tune.search.optuna import OptunaSearch
from raypo import Tuner

def rates(config, name):
    return Tuner(
        config,
        param_space={"learner.lr": tune.loguniform(1e-5, 1e-3)},
        tune_config=tune.TuneConfig(
            metric="eval/loss",
            mode="min",
            num_samples=3,
            search_alg=OptunaSearch(seed=0),
            max_concurrent_trials=1,
        ),
        run_config=tune.RunConfig(name=name, verbose=0),
    )

if __name__ == "__main__":
    rates(sys.argv[1], "stopped").fit()
    print("ENDED")
"""


def test_an_experiment_that_was_stopped_goes_on(
    tmp_path: Path, local_ray: None, monkeypatch: pytest.MonkeyPatch
):
    """The second of three trials is stopped; all three are then those of an undisturbed one."""
    write_examples(tmp_path)
    values: dict[str, Any] = sft_values(tmp_path) | {"num_steps": 200}
    del values["eval"]["function"]
    values["eval"]["every"] = values["checkpoint"]["every"] = 20
    config = tmp_path / "sft.yaml"
    config.write_text(yaml.safe_dump(values))
    (tmp_path / "rates.py").write_text(RATES)
    stopped = tmp_path / "runs" / "stopped"
    script = subprocess.Popen(
        [sys.executable, tmp_path / "rates.py", config],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_ADDRESS": "local"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while len(list(stopped.glob("trials/stopped-*"))) < 2 and script.poll() is None:
        time.sleep(0.1)
    first, second = sorted(stopped.glob("trials/stopped-*"), key=lambda each: each.stat().st_ctime)
    wait_for_steps(second, 30)
    script.send_signal(signal.SIGTERM)
    out, _ = script.communicate(timeout=60)
    assert out.splitlines()[-1] == "ENDED", out[-5000:]
    assert f"Tuner.restore('{stopped}', ...) resumes" in out
    assert len(read_metrics(first)) == 200
    assert 30 <= len(read_metrics(second)) < 200

    restored = Tuner.restore(stopped, config).fit()
    monkeypatch.syspath_prepend(tmp_path)
    undisturbed = importlib.import_module("rates").rates(config, "undisturbed").fit()
    assert [result.error for result in restored] == [None] * 3
    by_rate = [
        {(result.metrics or {})["config"]["learner.lr"]: Path(result.path) for result in results}
        for results in (restored, undisturbed)
    ]
    assert by_rate[0].keys() == by_rate[1].keys()
    assert set(by_rate[0].values()) == set(stopped.glob("trials/stopped-*"))
    for rate, path in by_rate[0].items():
        assert numbers(read_metrics(path)) == numbers(read_metrics(by_rate[1][rate]))


SCRIPT = """
import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search.optuna import OptunaSearch

from raypo import Tuner

if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False)
    results = Tuner(
        "{config}",
        param_space={{"learner.policy_lr": tune.loguniform(1e-4, 1e-2)}},
        tune_config=tune.TuneConfig(
            metric="eval/score_mean",
            mode="max",
            num_samples=3,
            search_alg=OptunaSearch(seed=0),
            scheduler=ASHAScheduler(time_attr="step", max_t=4, grace_period=2),
        ),
        run_config=tune.RunConfig(name="script", storage_path="{storage}"),
    ).fit()
    assert ray.is_initialized()
    print("BEST", results.get_best_result().path, [result.error for result in results])
"""


def test_a_script_that_has_connected_to_ray_itself(task: Path, tmp_path: Path):
    """Relative paths start where the script does, although Tune starts trials elsewhere."""
    script = tmp_path / "tuned.py"
    storage = os.path.relpath(tmp_path, REPOSITORY)
    script.write_text(SCRIPT.format(config=os.path.relpath(task, REPOSITORY), storage=storage))
    done = subprocess.run(
        [sys.executable, script],
        cwd=REPOSITORY,
        # Not a Ray that happens to run on this machine.
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert "best so far: " in done.stdout
    assert "Trial status" not in done.stdout  # Ray's table, whose trials have 75 metrics each
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("BEST"))
    assert line.endswith("[None, None, None]")
    assert Path(line.split()[1]).resolve().is_relative_to(tmp_path / "script" / "trials")
