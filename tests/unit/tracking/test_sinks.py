import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypo.config import ConfigError, LoggingSection, MLflowSection, WandbSection
from raypo.storage.run_files import RunFiles
from raypo.tracking.sinks import MLflow, Sinks, Wandb, check_installed

ONLY_FILES = {"tensorboard": False, "prometheus": False}


def open_sinks(folder: Path, **section) -> Sinks:
    logging = LoggingSection.model_validate(ONLY_FILES | section)
    files = RunFiles(str(folder), "r")
    return Sinks.open(logging, files=files, config={"ppo": {"kl": {"coef": 0.02}}})


def test_tensorboard_is_one_of_them(tmp_path: Path):
    sinks = open_sinks(tmp_path, tensorboard=True)
    sinks.write(1, {"rollout/score_mean": 0.5, "ppo/value_loss": math.nan})
    sinks.close()
    sinks.close()
    assert [path.name[:20] for path in (tmp_path / "r").iterdir()] == ["events.out.tfevents."]


@pytest.mark.parametrize("key", ["wandb", "mlflow"])
def test_what_is_not_installed_is_refused_with_the_remedy(
    key: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("raypo.tracking.sinks.find_spec", lambda name: None)
    section = LoggingSection.model_validate({key: {}})
    with pytest.raises(ConfigError, match=rf"logging\.{key}.*pip install {key}"):
        check_installed(section)
    check_installed(LoggingSection())


class Tracker:
    """Stands in for the packages wandb and mlflow, and records the runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ids: list[str] = []
        self.statuses: list[Any] = []
        self.finish = lambda exit_code: self.statuses.append(exit_code)
        run = SimpleNamespace(define_metric=lambda *_, **__: None, finish=self.finish)
        wandb = SimpleNamespace(init=lambda **options: self.ids.append(options["id"]) or run)
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        tracking = SimpleNamespace(MlflowClient=lambda uri: self)
        monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(tracking=tracking))
        monkeypatch.setitem(sys.modules, "mlflow.tracking", tracking)

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="1")

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.ids.append(f"{run_name}-{len(self.ids)}")
        return SimpleNamespace(info=SimpleNamespace(run_id=self.ids[-1]))

    def update_run(self, run_id: str, status: str) -> None:
        assert run_id == self.ids[-1]
        self.statuses.append(status)

    def set_terminated(self, run_id: str, status: str) -> None:
        self.update_run(run_id, status)


@pytest.mark.parametrize("place", ["local", "uri"])
def test_a_resumed_run_has_the_same_run_at_wandb_and_mlflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
):
    """With a URI too, where each attempt has a new local folder."""
    tracker = Tracker(monkeypatch)
    storage = str(tmp_path) if place == "local" else tmp_path.as_uri()
    for _ in range(2):
        Wandb(WandbSection(), files=RunFiles(storage, "r"), config={})
    first, second = tracker.ids
    assert first == second == (tmp_path / "r" / "wandb-id.txt").read_text().strip()
    tracker.ids.clear()
    for _ in range(2):
        MLflow(MLflowSection(), files=RunFiles(storage, "r"), config={})
    assert tracker.ids == [(tmp_path / "r" / "mlflow-id.txt").read_text().strip()]


def test_wandb_and_mlflow_show_how_a_run_has_ended_and_that_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tracker, files = Tracker(monkeypatch), RunFiles(str(tmp_path), "r")
    for status in ("failed", "interrupted", "finished"):
        Sinks([MLflow(MLflowSection(), files=files, config={})]).close(status)
    assert tracker.statuses == ["FAILED", "RUNNING", "KILLED", "RUNNING", "FINISHED"]
    tracker.statuses.clear()
    for status in ("failed", "interrupted", "finished"):
        Sinks([Wandb(WandbSection(), files=files, config={})]).close(status)
    assert tracker.statuses == [1, 0, 0]


@pytest.mark.filterwarnings("default")
def test_mlflow_has_every_step_and_one_run_for_all_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tracking = pytest.importorskip("mlflow.tracking")
    pytest.importorskip("sqlalchemy")

    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for step in (1, 2):
        sinks = open_sinks(tmp_path, mlflow={"experiment": "x", "tracking_uri": uri})
        sinks.write(step, {"rollout/score_mean": step / 4, "ppo/value_loss": math.nan})
        sinks.close()
    client = tracking.MlflowClient(uri)
    experiment = client.get_experiment_by_name("x")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "rollout/score_mean")
    assert [(point.step, point.value) for point in history] == [(1, 0.25), (2, 0.5)]
    assert run.data.params["ppo.kl.coef"] == "0.02"
    assert "ppo/value_loss" not in run.data.metrics
    assert run.info.run_name == "r"
