import math
from pathlib import Path

import pytest

from raypo.config import ConfigError, LoggingSection
from raypo.tracking.sinks import Sinks, check_installed, prometheus_name

ONLY_FILES = {"tensorboard": False, "prometheus": False}


def open_sinks(folder: Path, **section) -> Sinks:
    logging = LoggingSection.model_validate(ONLY_FILES | section)
    return Sinks.open(logging, folder=folder, name="r", config={"ppo": {"kl": {"coef": 0.02}}})


def test_without_sinks_nothing_is_written(tmp_path: Path):
    sinks = open_sinks(tmp_path)
    sinks.write(1, {"rollout/score_mean": 0.5})
    sinks.close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_is_one_of_them(tmp_path: Path):
    sinks = open_sinks(tmp_path, tensorboard=True)
    sinks.write(1, {"rollout/score_mean": 0.5, "ppo/value_loss": math.nan})
    sinks.close()
    sinks.close()
    assert [path.name[:20] for path in tmp_path.iterdir()] == ["events.out.tfevents."]


@pytest.mark.parametrize("key", ["wandb", "mlflow"])
def test_what_is_not_installed_is_refused_with_the_remedy(
    key: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("raypo.tracking.sinks.find_spec", lambda name: None)
    section = LoggingSection.model_validate({key: {}})
    with pytest.raises(ConfigError, match=rf"logging\.{key}.*pip install {key}"):
        check_installed(section)
    check_installed(LoggingSection())


def test_prometheus_names_are_stable():
    assert prometheus_name("rollout/score_mean") == "raypo_rollout_score_mean"
    assert prometheus_name("eval/pass_at_1") == "raypo_eval_pass_at_1"


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
