"""A trial: a PPOTrainer run inside a Ray Tune trial, reported through Ray's own callback.

On a small machine the price of a trial is its processes, each of which imports Ray and torch. So
Ray Train's controller runs in the trial's own one, and Tune hands that on to the next trial.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ray import tune
from ray.actor import ActorHandle
from ray.train import Checkpoint, Result, RunConfig
from ray.train._internal.session import get_session
from ray.tune.integration.ray_train import TuneReportCallback
from ray.util.queue import Empty

from raypo.checks import is_finished
from raypo.config import PPOConfig
from raypo.config.sweep_config import with_values
from raypo.deployment.reserve import Dedicated
from raypo.run.setup import Runtime, Shared
from raypo.storage.run_files import RunFiles
from raypo.trainer import PPOTrainer
from raypo.tuning.capacity import trial_name
from raypo.tuning.goal import Goal, as_report, known_metrics
from raypo.tuning.population import Segment, next_segment, run_with_pointers
from raypo.tuning.search import POINT, Point

PREDECESSOR_TIMEOUT_S = 60.0
"""A process that Tune has stopped is killed well before."""
LAST_STEP_TIMEOUT_S = 3600
"""For the last step of a trial whose process is handed on; Tune fails the next trial after it."""


@dataclass(frozen=True)
class TrialSetup:
    """What all trials of a sweep have in common; it travels to their processes."""

    sweep: str
    base: dict[str, Any]
    """The base as written, overrides included."""
    storage_path: str
    """Of the trials' runs."""
    working_dir: str
    """The driver's folder; relative paths start there."""
    goal: Goal
    is_population: bool = False
    """Whether trials copy each other's checkpoints (pbt)."""
    janitor: ActorHandle | None = None
    shared: Shared | None = None

    def config(self, name: str, point: Point) -> PPOConfig:
        """The run config of a trial."""
        fixed = {"name": name, "storage_path": self.storage_path}
        values = with_values(self.base, {**point, **fixed})
        return PPOConfig.parse(values, origin=name).with_absolute_paths(self.working_dir)

    def files(self, number: int) -> RunFiles:
        """The files of a trial's run."""
        return RunFiles(self.storage_path, trial_name(self.sweep, number))


def run_trial(config: dict[str, Any], setup: TrialSetup) -> None:
    """Start or resume the run of a trial; Tune calls it in an actor of its own."""
    name = tune.get_context().get_trial_name()
    assert name is not None
    run, files = setup.config(name, config[POINT]), RunFiles(setup.storage_path, name)
    _wait_for_predecessor(files)
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(LAST_STEP_TIMEOUT_S)
    known = known_metrics(files.metrics(), setup.goal)
    if is_finished(files):  # the driver was killed before it could note that
        tune.report(as_report(known, setup.goal))
    elif setup.is_population:
        segment = next_segment(files, tune.get_checkpoint())

        def fit(callback: Any) -> None:
            TrialTrainer(run, setup, callback, segment).fit()

        known = segment.known or known
        run_with_pointers(fit, setup.goal, known, trial=name, segment=segment)
    else:
        TrialTrainer(run, setup, TrialReports(setup.goal, known)).fit()


def _wait_for_predecessor(files: RunFiles) -> None:
    """pbt starts a trial again while the process that it has stopped may still be dying."""
    deadline = time.monotonic() + PREDECESSOR_TIMEOUT_S
    while files.is_running() and time.monotonic() < deadline:
        time.sleep(0.5)


class TrialTrainer(PPOTrainer):
    """A PPOTrainer whose workers know the sweep that they are part of."""

    def __init__(
        self, config: PPOConfig, setup: TrialSetup, callback: Any, segment: Segment | None = None
    ) -> None:
        self._setup, self._segment = setup, segment
        super().__init__(config, run_config=RunConfig(callbacks=[callback]))

    def _runtime(self, monitor: ActorHandle, dedicated: Dedicated) -> Runtime:
        runtime = super()._runtime(monitor, dedicated)
        return dataclasses.replace(
            runtime,
            janitor=self._setup.janitor,
            shared=self._setup.shared,
            resume_from=self._segment.resume_from if self._segment else None,
        )

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        """In this process; where a later Ray has no such method, it starts another one again."""
        from ray.train.v2._internal.execution.controller import TrainController

        controller = TrainController(**arguments)
        asyncio.run(controller.run())
        return controller.get_result()

    def _is_unwanted(self) -> bool:
        callbacks = self.run_config.callbacks or ()
        return any(isinstance(c, TrialReports) and c.are_unwanted() for c in callbacks)

    def _run_config(self, given: RunConfig | None) -> RunConfig:
        run_config = super()._run_config(given)
        return self._segment.run_config(run_config) if self._segment else run_config

    def _check_folder(self) -> None:
        if self._segment is None:  # pbt changes the config of a run as it goes
            super()._check_folder()


class TrialReports(TuneReportCallback):
    """Each step's metrics for Tune, with the last known values of those that it did not measure.

    Schedulers compare trials at every report; held-out scores are not measured at every step.
    """

    def __init__(self, goal: Goal, known: Mapping[str, float]) -> None:
        super().__init__()
        self._goal, self._known = goal, dict(known)

    def after_report(
        self,
        run_context: Any,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Ray Train calls it in its controller after each report of the workers."""
        self._known = known_metrics([self._known, metrics[0]], self._goal)
        super().after_report(run_context, [as_report(self._known, self._goal)], checkpoint)

    def are_unwanted(self) -> bool:
        """Whether Tune has stopped the trial and waits for its process.

        What was reported since then is dropped: nobody takes it, and the run would wait.
        """
        session = get_session()
        if session is None or not session.stop_event.is_set():
            return False
        with suppress(Empty):
            self._training_actor_item_queue.get_nowait()
        return True
