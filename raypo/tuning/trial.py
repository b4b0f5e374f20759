"""A trial: a trainer's run inside a Ray Tune trial, reported through Ray's own callback.

On a small machine the price of a trial is its processes, each of which imports Ray and torch. So
Ray Train's controller runs in the trial's own one, and Tune hands that on to the next trial.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import tune
from ray.actor import ActorHandle
from ray.train import Checkpoint, RunConfig, UserCallback

from raypo.checks import check_recorded_inputs, is_finished
from raypo.config import AnyConfig, parse_run_config
from raypo.config.sweep_config import with_values
from raypo.deployment.reserve import Dedicated
from raypo.inputs import learn_digests
from raypo.ray_internals import run_controllers_here
from raypo.run.setup import Runtime, Shared
from raypo.storage.run_files import RunFiles
from raypo.trainer import RecipeTrainer, trainer_class
from raypo.tuning.capacity import trial_name
from raypo.tuning.goal import Goal, as_report, known_metrics
from raypo.tuning.population import Segment
from raypo.tuning.search import POINT, Point

PREDECESSOR_TIMEOUT_S = 60.0
"""A process that Tune has stopped is killed well before."""
TURN_S = 0.5
"""How often a trial asks whether it may reserve its placement groups."""
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
    digests: Mapping[tuple[str, int, int, int], str] = field(default_factory=dict)
    """Digests of the inputs that trials share, so that each is read once and not once a trial."""

    def config(self, name: str, point: Point) -> AnyConfig:
        """The run config of a trial."""
        fixed = {"name": name, "storage_path": self.storage_path}
        values = with_values(self.base, {**point, **fixed})
        return parse_run_config(values, origin=name).with_absolute_paths(self.working_dir)

    def files(self, number: int) -> RunFiles:
        """The files of a trial's run."""
        return RunFiles(self.storage_path, trial_name(self.sweep, number))


def run_trial(config: dict[str, Any], setup: TrialSetup) -> None:
    """Start or resume the run of a trial; Tune calls it in an actor of its own."""
    name = tune.get_context().get_trial_name()
    assert name is not None
    run, files = setup.config(name, config[POINT]), RunFiles(setup.storage_path, name)
    _wait_for_predecessor(files)
    learn_digests(setup.digests)
    os.environ["TUNE_FUNCTION_THREAD_TIMEOUT_S"] = str(LAST_STEP_TIMEOUT_S)
    known = known_metrics(files.metrics(), setup.goal)
    if is_finished(files, run):  # the driver was killed before it could note that
        tune.report(as_report(known, setup.goal))
        return
    segment = None
    if setup.is_population:
        segment, pointer = Segment.last(files), tune.get_checkpoint()
        if pointer is not None:
            segment = segment.next(pointer, files)
        elif segment.checkpoint is not None:  # the sweep goes on: here it may have to wait
            segment.report(as_report(segment.known, setup.goal))
        known = segment.known
    reports = TrialReports(setup.goal, known, files, segment)
    trial_trainer(run)(run, setup, reports, segment).fit()
    if reports.are_unwanted:
        raise SystemExit(0)  # as Tune has asked for


def _wait_for_predecessor(files: RunFiles) -> None:
    """pbt starts a trial again while the process that it has stopped may still be dying."""
    deadline = time.monotonic() + PREDECESSOR_TIMEOUT_S
    while files.is_running() and time.monotonic() < deadline:
        time.sleep(0.5)


def trial_trainer(config: AnyConfig) -> type[TrialTrainer]:
    """The trainer of a trial of the config's recipe."""
    kind = trainer_class(config)
    return type("TrialTrainer", (TrialTrainer,), {"loop": kind.loop, "config_class": type(config)})


class TrialTrainer(RecipeTrainer[AnyConfig]):
    """A trainer whose workers know the sweep that they are part of."""

    def __init__(
        self,
        config: AnyConfig,
        setup: TrialSetup,
        reports: TrialReports,
        segment: Segment | None,
    ) -> None:
        self._setup, self._reports, self._segment = setup, reports, segment
        super().__init__(config, run_config=RunConfig(callbacks=[reports]))
        run_controllers_here(self)

    def _runtime(self, monitor: ActorHandle, dedicated: Dedicated) -> Runtime:
        runtime = super()._runtime(monitor, dedicated)
        return dataclasses.replace(
            runtime,
            shared=self._setup.shared,
            resume_from=self._segment.resume_from if self._segment else None,
        )

    def _start_janitor(self, monitor: ActorHandle) -> ActorHandle | None:
        return self._setup.janitor

    def _start_dedicated(self, monitor: ActorHandle, say: Callable[[str], object]) -> Dedicated:
        if self.config.placement.is_dedicated and self._janitor is not None:
            take_turn = self._janitor.take_turn
            while not ray.get(take_turn.remote(self.config.name, monitor)):
                time.sleep(TURN_S)
        return super()._start_dedicated(monitor, say)

    def _is_unwanted(self) -> bool:
        # One that pbt has stopped begins again where it was stopped.
        return self._reports.are_unwanted and self._segment is None

    def _run_config(self, given: RunConfig | None) -> RunConfig:
        run_config = super()._run_config(given)
        return self._segment.run_config(run_config, self._files) if self._segment else run_config

    def _check_folder(self) -> None:
        if self._segment is None:
            super()._check_folder()
        elif self._files.last_step():  # pbt changes the config of a run as it goes, not its files
            check_recorded_inputs(self.config, self._files)


class TrialReports(UserCallback):
    """Each step's metrics for Tune, with the last known values of those that it did not measure.

    Schedulers compare trials at every report; held-out scores are not measured at every step.
    """

    def __init__(
        self, goal: Goal, known: Mapping[str, float], files: RunFiles, segment: Segment | None
    ) -> None:
        """Nothing is reported yet.

        Args:
            known: Metrics of the trial as far as it has come.
            files: Of the trial.
            segment: Of pbt: what its reports point to.
        """
        self._goal, self._known = goal, known
        self._files, self._segment = files, segment
        self.are_unwanted = False
        """Whether Tune has stopped the trial and waits for its process to become free."""

    def after_report(
        self,
        run_context: Any,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Ray Train's controller, in this process, calls it after each report of the workers.

        It comes back when Tune has decided whether the trial goes on.
        """
        self._known = known_metrics([self._known, metrics[0]], self._goal)
        report = as_report(self._known, self._goal)
        if self.are_unwanted:
            return
        try:
            if self._segment is not None and checkpoint is not None:
                self._segment = self._segment.at(checkpoint.path, self._known, self._files)
                self._segment.report(report)
            else:
                tune.report(report)
        except SystemExit:  # so Tune ends a trial; the run ends after its step
            self.are_unwanted = True
