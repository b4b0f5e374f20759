"""Metric sinks besides metrics.jsonl: Weights & Biases, MLflow, TensorBoard and Prometheus."""

from __future__ import annotations

import math
import re
import secrets
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, Protocol

from typing_extensions import override

from raypo.config import ConfigError, LoggingSection, MLflowSection, WandbSection
from raypo.config.base import flatten
from raypo.metrics.catalogue import MEANINGS
from raypo.storage.run_files import RunFiles

if TYPE_CHECKING:
    from ray.util.metrics import Gauge

REPEAT_GAUGES_S = 5.0
Status = Literal["finished", "interrupted", "failed"]
_MLFLOW_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_WANDB_ID, _MLFLOW_ID = "wandb-id.txt", "mlflow-id.txt"


class Sink(Protocol):
    """Destination of metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step. All values must be finite."""
        ...

    def close(self, status: Status) -> None:
        """Wait until everything is sent. Called once, after the last `write`."""
        ...


class Sinks:
    """The sinks of a run's `logging` section, combined into one."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    @classmethod
    def open(
        cls,
        section: LoggingSection,
        *,
        files: RunFiles,
        config: Mapping[str, Any],
        first_step: int = 1,
    ) -> Sinks:
        """Open the sinks that the section enables.

        Args:
            section: The `logging` section.
            files: The run's files. They keep the ids of the run at W&B and MLflow.
            config: The resolved config, for sinks that show it.
            first_step: Next step to be written. A resumed run continues the same curves.

        Raises:
            ConfigError: a package is not installed.
        """
        check_installed(section)
        sinks: list[Sink] = []
        if section.tensorboard:
            from raypo.tracking.tensorboard import TensorBoard

            sinks.append(TensorBoard(files.folder, first_step=first_step))
        if section.wandb is not None:
            sinks.append(Wandb(section.wandb, files=files, config=config))
        if section.mlflow is not None:
            sinks.append(MLflow(section.mlflow, files=files, config=config))
        if section.prometheus:
            sinks.append(RayMetrics(run=files.name))
        return cls(sinks)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the finite metrics of one step to every sink."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        for sink in self._sinks:
            sink.write(step, finite)

    def close(self, status: Status = "finished") -> None:
        """Close every sink, with the status of the run for those that show it. Idempotent."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            sink.close(status)


def check_installed(section: LoggingSection) -> None:
    """Raise if the package of an enabled sink is not installed. Nothing is imported.

    Raises:
        ConfigError: a package is not installed.
    """
    for key in ("wandb", "mlflow"):
        if getattr(section, key) is not None and find_spec(key) is None:
            raise ConfigError(
                f"logging.{key}: the package {key} is not installed. "
                f"Install it (pip install {key}), or set logging.{key} to null."
            )


class Wandb(Sink):
    """Weights & Biases sink. A resumed run continues the same W&B run."""

    def __init__(
        self, section: WandbSection, *, files: RunFiles, config: Mapping[str, Any]
    ) -> None:
        import wandb

        plain = re.sub(r"[^A-Za-z0-9_-]", "-", files.name)[:40]
        earlier_id = _remembered(files, _WANDB_ID)
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            mode=section.mode,
            name=files.name,
            id=earlier_id or _remember(files, _WANDB_ID, f"{plain}-{secrets.token_hex(4)}"),
            resume="allow",
            dir=str(files.folder),
            config=dict(config),
            reinit="create_new",
        )
        self._run.define_metric("*", step_metric="step")

    @override
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    @override
    def close(self, status: Status) -> None:
        self._run.finish(exit_code=int(status == "failed"))


class MLflow(Sink):
    """MLflow sink. A resumed run continues the same MLflow run."""

    def __init__(
        self, section: MLflowSection, *, files: RunFiles, config: Mapping[str, Any]
    ) -> None:
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client = MlflowClient(section.tracking_uri)
        existing = self._client.get_experiment_by_name(section.experiment)
        experiment = (
            existing.experiment_id
            if existing
            else self._client.create_experiment(section.experiment)
        )
        if earlier_id := _remembered(files, _MLFLOW_ID):
            self._id = earlier_id
            self._client.update_run(earlier_id, status="RUNNING")
            return
        created = self._client.create_run(experiment, run_name=files.name)
        self._id = _remember(files, _MLFLOW_ID, created.info.run_id)
        for key, value in flatten(config).items():
            self._client.log_param(self._id, key, str(value)[:500])

    @override
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(time.time() * 1000)
        rows = [Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=rows)

    @override
    def close(self, status: Status) -> None:
        self._client.set_terminated(self._id, _MLFLOW_STATUS[status])


class RayMetrics(Sink):
    """Gauges on Ray's metrics endpoint, for Prometheus, with the labels `run` and `trial`.

    If a step lacks a metric, its gauge keeps the last value. A daemon thread sets all gauges again
    every `REPEAT_GAUGES_S` seconds.
    """

    def __init__(self, *, run: str) -> None:
        trial = re.search(r"-(\d{5})$", run)  # suffix of a sweep's runs
        self._labels = {"run": run, "trial": trial[1] if trial else ""}
        self._gauges: dict[str, Gauge] = {}
        self._values: dict[str, float] = {}
        self._lock, self._closed = threading.Lock(), threading.Event()
        threading.Thread(target=self._repeat, name="raypo-gauges", daemon=True).start()

    @override
    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._lock:
            self._values |= {"step": step, **metrics}
            self._set()

    @override
    def close(self, status: Status) -> None:
        self._closed.set()

    def _repeat(self) -> None:
        """Set all gauges repeatedly, because Ray drops a gauge that is not set for some seconds."""
        while not self._closed.wait(REPEAT_GAUGES_S):
            with self._lock:
                self._set()

    def _set(self) -> None:
        from ray.util.metrics import Gauge

        for name, value in self._values.items():
            if name not in self._gauges:
                self._gauges[name] = Gauge(
                    prometheus_name(name),
                    description=MEANINGS.get(name, name),
                    tag_keys=tuple(self._labels),
                )
            self._gauges[name].set(value, tags=self._labels)


def prometheus_name(metric: str) -> str:
    """Return a metric's name in Prometheus, like raypo_rollout_score_mean. Ray prepends `ray_`."""
    return f"raypo_{re.sub(r'[^a-zA-Z0-9_*]', '_', metric)}"


def _remembered(files: RunFiles, name: str) -> str | None:
    """Return the id that an earlier attempt has written, or None if there is none."""
    content = files.read(name)
    return None if content is None else content.decode().strip()


def _remember(files: RunFiles, name: str, new: str) -> str:
    """Write an id for later attempts, and return it."""
    files.write(name, f"{new}\n".encode())
    files.sync(models=False)  # now, because the attempt may be killed before its first step ends
    return new
