"""A trial of a sweep: a trainer's run inside a Ray Tune trial.

Processes: Tune runs each trial in an actor, and `run_trial` runs Ray Train's controller in the same
actor. The controller calls `TrialReports` after each report of the learner workers, and waits there
until Tune has decided if the trial continues.

On a small machine most of a trial's cost is starting processes, each of which imports Ray and
torch. The controller therefore has no separate process, and Tune reuses the actor for the next
trial (on CPUs, without pbt).
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from ray import tune
from ray.actor import ActorHandle
from ray.train import Checkpoint, RunConfig, UserCallback

from raypo.checks.resume_checks import check_recorded_inputs, is_finished
from raypo.config import AnyConfig, parse_run_config
from raypo.config.fields import known_keys
from raypo.config.recipe_config import RECIPES
from raypo.config.sweep_config import with_values
from raypo.deployment.reserve import MESSAGE_AFTER_S, Dedicated
from raypo.inputs import add_digests
from raypo.ray_internals import run_controllers_in_process
from raypo.run.setup import Runtime, Shared
from raypo.storage.checkpoints import newest_step
from raypo.storage.run_files import RunFiles
from raypo.trainer import RecipeTrainer
from raypo.tuning.goal import STEP, Goal, as_report, last_metrics
from raypo.tuning.population import Segment
from raypo.tuning.record import Point

PREDECESSOR_TIMEOUT_S = 60.0
"""Maximum wait, in seconds, for the stopped process of the same trial. Tune usually kills that
process much earlier."""
TURN_S = 0.5
"""Polling interval of a trial that waits for its turn to reserve placement groups."""
LAST_STEP_TIMEOUT_S = 3600
"""Time limit, in seconds, of a stopped trial's last step before its actor is reused. If the step
takes longer, Tune fails the next trial."""


@dataclass(frozen=True)
class TrialSetup:
    """Settings that all trials of a sweep share. They are pickled to the trials' processes."""

    base: Mapping[str, Any]
    """Values of the base run config as written, with overrides."""
    storage_path: str
    """Storage path of the trials' runs."""
    working_dir: str
    """Working directory of the driver. Relative paths are resolved against it."""
    goal: Goal
    """Objective whose value is added to reports."""
    is_population: bool = False
    """True if trials copy each other's checkpoints (pbt)."""
    group_gc: ActorHandle | None = None
    shared: Shared | None = None
    digests: Mapping[tuple[str, int, int, int], str] = field(default_factory=dict)
    """Digests of shared inputs, so that each file is hashed once, not once per trial."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of each trial's trainer, except its config and run config."""
    train_callbacks: tuple[UserCallback, ...] = ()
    """Ray Train callbacks of each trial's run."""
    worker_runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of each trial's learner workers."""

    def config(self, name: str, config: Mapping[str, Any]) -> AnyConfig:
        """Return the run config of a trial with the values of its Tune config."""
        point = point_of(config, RECIPES[self.base.get("recipe", "ppo")])
        identity = {"name": name, "storage_path": self.storage_path}
        values = with_values(self.base, {**point, **identity})
        return parse_run_config(values, origin=name).with_absolute_paths(self.working_dir)


def point_of(config: Mapping[str, Any], config_class: type[AnyConfig]) -> Point:
    """Return the values of a trial by dotted key, as plain Python values.

    Args:
        config: Tune's config of the trial, nested or with dotted keys.
        config_class: Class of the run config.
    """
    sections = {key.rpartition(".")[0] for key in known_keys(config_class)}

    def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            if isinstance(value, Mapping) and f"{prefix}{key}" in sections:
                yield from flatten(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", plain(value)

    return dict(flatten(config))


def plain(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number or text, for YAML."""
    return value.item() if isinstance(value, np.generic) else value


def run_trial(config: dict[str, Any], setup: TrialSetup) -> None:
    """Start or resume the run of a trial. Tune calls this function in the trial's actor."""
    name = tune.get_context().get_trial_name()
    assert name is not None
    run_config, files = setup.config(name, config), RunFiles(setup.storage_path, name)
    _wait_for_predecessor(files)
    add_digests(setup.digests)
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(LAST_STEP_TIMEOUT_S)
    rows = files.metrics()
    if is_finished(files, run_config):  # the driver was killed before it recorded the end
        tune.report(as_report(last_metrics(rows, setup.goal), setup.goal))
        return
    resume_step = newest_step(files)  # steps after the checkpoint are repeated
    metrics = last_metrics((row for row in rows if row[STEP] <= resume_step), setup.goal)
    segment = None
    if setup.is_population:
        segment, pointer = Segment.last(files), tune.get_checkpoint()
        if pointer is not None:
            segment = segment.next(pointer, files)
        elif segment.checkpoint is not None:  # resumed sweep; this report may block
            segment.report(as_report(segment.known, setup.goal))
        metrics = segment.known
    reports = TrialReports(setup.goal, metrics, files, segment)
    trial_trainer_class(run_config)(run_config, setup, reports, segment).fit()
    if reports.is_trial_stopped:
        raise SystemExit(0)  # Tune requested it in `TrialReports.after_report`


def _wait_for_predecessor(files: RunFiles) -> None:
    """Wait for the earlier process of the trial, which pbt has stopped, to exit."""
    deadline = time.monotonic() + PREDECESSOR_TIMEOUT_S
    while files.is_running() and time.monotonic() < deadline:
        time.sleep(0.5)


def trial_trainer_class(config: AnyConfig) -> type[TrialTrainer]:
    """Return the trainer class for trials of the config's recipe."""
    return type("TrialTrainer", (TrialTrainer,), {"config_class": type(config)})


class TrialTrainer(RecipeTrainer[AnyConfig]):
    """Trainer of one trial.

    It uses the sweep's shared deployments and the sweep's garbage collector of placement groups.
    In a pbt sweep it runs one segment of the trial.
    """

    def __init__(
        self,
        config: AnyConfig,
        setup: TrialSetup,
        reports: TrialReports,
        segment: Segment | None,
    ) -> None:
        self._setup, self._reports, self._segment = setup, reports, segment
        run_config = RunConfig(
            callbacks=[reports, *setup.train_callbacks],
            worker_runtime_env=dict(setup.worker_runtime_env),
        )
        super().__init__(config, run_config=run_config, **setup.arguments)
        run_controllers_in_process(self)

    def _runtime(self, monitor: ActorHandle, dedicated: Dedicated) -> Runtime:
        runtime = super()._runtime(monitor, dedicated)
        return dataclasses.replace(
            runtime,
            shared=self._setup.shared,
            is_trial=True,
            resume_from=self._segment.resume_from if self._segment else None,
        )

    def _start_group_gc(self, monitor: ActorHandle) -> ActorHandle | None:
        return self._setup.group_gc

    def _start_dedicated(self, monitor: ActorHandle, say: Callable[[str], object]) -> Dedicated:
        if self.config.placement.is_dedicated and self._group_gc is not None:
            take_turn = self._group_gc.take_turn
            started_at, has_said = time.monotonic(), False
            while reserving_run := ray.get(take_turn.remote(self.config.name, monitor)):
                if time.monotonic() - started_at > MESSAGE_AFTER_S and not has_said:
                    has_said = True
                    say(f"waiting until {reserving_run} has reserved its resources and started")
                time.sleep(TURN_S)
        return super()._start_dedicated(monitor, say)

    def _is_unwanted(self) -> bool:
        # pbt restarts a stopped trial at the step of the stop.
        return self._reports.is_trial_stopped and self._segment is None

    def _run_config(self, run_config: RunConfig | None) -> RunConfig:
        run_config = super()._run_config(run_config)
        return self._segment.run_config(run_config, self._files) if self._segment else run_config

    def _check_folder(self) -> None:
        if self._segment is None:
            super()._check_folder()
        elif self._files.last_step():  # pbt changes the config during a run, but not the inputs
            check_recorded_inputs(self.config, self._files)


class TrialReports(UserCallback):
    """Ray Train callback that reports each step's metrics to Tune.

    Schedulers compare trials at every report, but held-out scores are not measured at every step.
    A report therefore adds the last known values of the metrics that the step did not measure.
    """

    def __init__(
        self,
        goal: Goal,
        metrics: Mapping[str, float],
        files: RunFiles,
        segment: Segment | None,
    ) -> None:
        """Start with the last value of each metric.

        Args:
            goal: Objective of the experiment.
            metrics: Last value of each metric of the trial.
            files: Files of the trial.
            segment: Segment of a pbt trial, to whose checkpoint the reports point.
        """
        self._goal, self._metrics = goal, metrics
        self._files, self._segment = files, segment
        self.is_trial_stopped = False
        """True if Tune has stopped the trial and waits until its actor is free."""

    def after_report(
        self,
        run_context: Any,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Report to Tune. Return when Tune has decided if the trial continues.

        Ray Train's controller, in this process, calls this method after each report of the workers.
        """
        self._metrics = last_metrics([self._metrics, metrics[0]], self._goal)
        report = as_report(self._metrics, self._goal)
        if self.is_trial_stopped:
            return
        try:
            if self._segment is not None and checkpoint is not None:
                self._segment = self._segment.at(checkpoint.path, self._metrics, self._files)
                self._segment.report(report)
            else:
                tune.report(report)
        except SystemExit:  # Tune stops a trial in this way; the run ends after its step
            self.is_trial_stopped = True
