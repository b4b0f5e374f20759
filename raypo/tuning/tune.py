"""Driver of a sweep: replay completed trials to searcher and scheduler, then run the others."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray import tune
from ray.tune import Stopper

from raypo.cluster.connect import connect, dashboard_url
from raypo.cluster.placement import takes_gpus
from raypo.cluster.placement_group_gc import start_placement_group_gc
from raypo.cluster.resources import alive_nodes
from raypo.config import AnyConfig
from raypo.config.sweep_config import SweepConfig
from raypo.inputs import known_digests, record_inputs
from raypo.ray_internals import tell_past
from raypo.storage.folder import below, open_folder
from raypo.storage.run_files import RunFiles
from raypo.tracking.console import Console
from raypo.trainer.watch import stop_on_signal
from raypo.tuning.board import Board
from raypo.tuning.capacity import SweepPlan, describe, plan_sweep, trial_name
from raypo.tuning.goal import Goal
from raypo.tuning.outcome import Outcome, write_outcome
from raypo.tuning.population import Segment
from raypo.tuning.record import TrialRecord, read_trials, write_trials
from raypo.tuning.schedule import reports_of, scheduler_of
from raypo.tuning.search import NUMBER, OptunaSearcher, listed_space
from raypo.tuning.shared import started
from raypo.tuning.sweep_folder import TRIALS_FOLDER, recorded_config
from raypo.tuning.trial import TrialSetup, run_trial
from raypo.tuning.view import SweepView

TUNE_FOLDER = "tune"
DRIVER_RESOURCES: dict[str, float] = {"memory": 1}
"""Resources of a trial's actor: almost nothing, otherwise trials could wait for each other. Learner
workers reserve theirs in placement groups of their own."""
_TUNE_ENVIRONMENT = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # `Board` and the runs record everything
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # `stop_on_signal` handles signals
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # keep the working directory, where relative paths start
}


@dataclass
class Stop(Stopper):
    """Tune stopper that ends all trials on request."""

    is_wanted: bool = False

    def __call__(self, trial_id: str, result: dict) -> bool:
        """Return False: single trials are not stopped."""
        return False

    def stop_all(self) -> bool:
        """Return True if the sweep is to stop."""
        return self.is_wanted


def run_sweep(sweep: SweepConfig, base: AnyConfig, files: RunFiles) -> Outcome:
    """Run the remaining trials of a sweep. The caller holds the sweep's lock.

    Args:
        sweep: Config of the sweep.
        base: Run config of a trial, without the values of the space.
        files: The sweep's folder, into which its config is written.

    Raises:
        ConfigError: not even one trial fits the cluster.
    """
    os.environ.update(_TUNE_ENVIRONMENT)
    connected_here = connect(base.cluster)
    try:
        nodes = alive_nodes()
        plan = plan_sweep(sweep, base, nodes, use_gpu=takes_gpus(base, nodes))
        files.write_config(recorded_config(sweep, base))
        for change in record_inputs(base, files, resumes=bool(read_trials(files))):
            Console().message(f"changed input, accepted: {change}")
        files.sync()
        return _Sweep(sweep, base, files, plan).run()
    finally:
        if connected_here:
            ray.shutdown()


def last_comparison(setup: TrialSetup, left: Sequence[TrialRecord]) -> int:
    """Return the step of the last pbt comparison of an earlier attempt; 0 if there is none.

    A comparison is complete as soon as one of the remaining trials has gone on after it.
    """
    compared = (Segment.last(setup.files(record.number)).compared for record in left)
    return max(compared, default=0)


def _name_of(sweep: str, trial: Any) -> str:
    return trial_name(sweep, trial.config[NUMBER])


class _Sweep:
    """One attempt at a sweep."""

    def __init__(
        self, sweep: SweepConfig, base: AnyConfig, files: RunFiles, plan: SweepPlan
    ) -> None:
        self._sweep, self._base, self._files, self._plan = sweep, base, files, plan
        self._goal, self._stop = Goal.of(sweep), Stop()
        self._started = time.monotonic()
        self._view = SweepView(
            self._goal, num_trials=plan.num_trials, num_steps=base.num_steps, device=plan.device
        )
        self._setup = TrialSetup(
            sweep=sweep.name,
            base=sweep.base_values(),
            storage_path=below(files.location, TRIALS_FOLDER),
            working_dir=os.getcwd(),
            goal=self._goal,
            is_population=sweep.scheduler.kind == "pbt",
            digests=known_digests(),
        )
        earlier = read_trials(files)
        self._ended = [record for record in earlier if record.has_ended]
        self._left = [record for record in earlier if record not in self._ended]
        self._last_comparison = last_comparison(self._setup, self._left)
        self._board = Board(
            {record.number: record for record in earlier},
            self._view,
            num_steps=base.num_steps,
            num_devices=plan.num_devices,
            write=self._write,
            is_stopping=self._stop.stop_all,
        )

    def run(self) -> Outcome:
        """Run the remaining trials and write the outcome."""
        self._greet()
        status = "failed"
        try:
            with stop_on_signal(self._stop_all):
                self._fit()
            status = "interrupted" if self._stop.is_wanted else "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            self._board.close()
            records = list(self._board.records.values())
            self._view.close(records)
            outcome = write_outcome(
                self._files,
                self._sweep,
                records,
                base=self._setup.base,
                status=status,
                wall_s=time.monotonic() - self._started,
            )
        self._tell(outcome)
        return outcome

    def _fit(self) -> None:
        if self._plan.num_trials <= len(self._ended):
            return
        group_gc = start_placement_group_gc()
        base = self._base.with_absolute_paths(self._setup.working_dir)
        logs_dir = str(self._files.logs_dir)
        try:
            with started(
                self._plan.sharing,
                base,
                self._sweep.name,
                num_slots=self._plan.num_slots,
                logs_dir=logs_dir,
            ) as shared:
                self._fit_trials(dataclasses.replace(self._setup, group_gc=group_gc, shared=shared))
        finally:
            ray.get(
                group_gc.close.remote()
            )  # removes groups of trials that were stopped at the end
            ray.kill(group_gc)

    def _fit_trials(self, setup: TrialSetup) -> None:
        scheduler = scheduler_of(self._sweep, self._base, last_comparison=self._last_comparison)
        if not setup.is_population:  # pbt compares only trials that still run
            past = {
                record.name: reports_of(
                    setup.files(record.number), self._goal, last_step=record.step
                )
                for record in self._ended
            }
            tell_past(scheduler, past)
        open_folder(self._files.location, TUNE_FOLDER).remove()
        name_of = partial(_name_of, self._sweep.name)
        which, search = self._trials()
        tuner = tune.Tuner(
            tune.with_resources(
                tune.with_parameters(run_trial, setup=setup),
                tune.PlacementGroupFactory([DRIVER_RESOURCES]),
            ),
            tune_config=tune.TuneConfig(
                **search,
                scheduler=scheduler,
                max_concurrent_trials=self._plan.num_slots,
                # A reused actor finishes its step first. On GPUs a stopped trial is killed at once,
                # to free them.
                reuse_actors=self._plan.device == "CPU" and not setup.is_population,
                trial_name_creator=name_of,
                trial_dirname_creator=name_of,
            ),
            run_config=tune.RunConfig(
                name=TUNE_FOLDER,
                storage_path=self._files.location,
                callbacks=[self._board],
                stop=self._stop,
                verbose=0,
            ),
            **which,
        )
        tuner.fit()

    def _trials(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments of Tuner and of TuneConfig that select the trials to run."""
        if self._sweep.searcher != "optuna":
            return {"param_space": listed_space(self._sweep, self._ended, self._left)}, {}
        return {}, {
            "search_alg": OptunaSearcher(self._sweep, self._ended, self._left),
            "num_samples": self._plan.num_trials - len(self._ended),
        }

    def _write(self) -> None:
        write_trials(self._files, list(self._board.records.values()), self._goal)
        self._files.sync()

    def _greet(self) -> None:
        for line in describe(self._sweep, self._base, self._plan):
            self._view.message(line)
        if self._ended or self._left:
            self._view.message(
                f"{len(self._ended)} trials are done, {len(self._left)} were begun and go on"
            )
        self._view.message(f"files in {self._files.location}; Ray dashboard: {dashboard_url()}")

    def _tell(self, outcome: Outcome) -> None:
        for line in outcome.lines():
            self._view.message(line)

    def _stop_all(self) -> None:
        self._stop.is_wanted = True
        self._view.message(
            "Stopping all trials; the same command goes on from their last checkpoints."
        )
