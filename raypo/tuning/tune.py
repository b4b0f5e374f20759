"""Driver of a sweep: replay completed trials to searcher and scheduler, then run the rest."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from ray import tune

from raypo.cluster.connect import dashboard_url
from raypo.cluster.placement import takes_gpus
from raypo.cluster.resources import alive_nodes
from raypo.config import AnyConfig
from raypo.config.sweep_config import SweepConfig
from raypo.inputs import known_digests, record_inputs
from raypo.ray_internals import tell_past
from raypo.storage.checkpoints import newest_step
from raypo.storage.folder import below, open_folder
from raypo.storage.run_files import RunFiles
from raypo.tracking.console import Console
from raypo.tuning.board import Board
from raypo.tuning.capacity import SweepPlan, describe, plan_sweep, trial_name
from raypo.tuning.experiment import (
    TUNE_FOLDER,
    StopOnRequest,
    connected,
    fit_trials,
)
from raypo.tuning.goal import Goal
from raypo.tuning.outcome import Outcome, write_outcome
from raypo.tuning.population import Segment
from raypo.tuning.record import NUMBER, TrialRecord, read_trials, write_trials
from raypo.tuning.schedule import reports_of, scheduler_of
from raypo.tuning.search import OptunaSearcher, listed_space
from raypo.tuning.sweep_folder import TRIALS_FOLDER, recorded_config
from raypo.tuning.trial import TrialSetup, run_trial
from raypo.tuning.view import SweepView


def run_sweep(
    sweep: SweepConfig, base: AnyConfig, files: RunFiles, *, fresh: bool = False
) -> Outcome:
    """Run the remaining trials of a sweep. The caller holds the sweep's lock.

    Args:
        sweep: Config of the sweep.
        base: Run config of a trial, without the values of the space.
        files: The sweep's folder, into which its config is written.
        fresh: Whether to remove an earlier sweep in the folder, once the trials have a place.

    Raises:
        ConfigError: not even one trial fits the cluster.
    """
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # `Board` and the runs record everything
    said = "Stopping all trials; the same command resumes them from their last checkpoints."
    stop = StopOnRequest()
    with connected(base, stop, said=said):
        nodes = alive_nodes()
        plan = plan_sweep(sweep, base, nodes, use_gpu=takes_gpus(base, nodes))
        if fresh:
            files.remove(kind="sweep")
        files.write_config(recorded_config(sweep, base))
        for change in record_inputs(base, files, resumes=bool(read_trials(files))):
            Console().message(f"changed input, accepted: {change}")
        files.sync()
        return _Sweep(sweep, base, files, plan, stop).run()


def last_comparison(setup: TrialSetup, left: Sequence[TrialRecord]) -> int:
    """Return the step of the last pbt comparison of an earlier attempt, or 0 if there is none.

    A comparison is complete as soon as one of the remaining trials has continued after it.
    """
    compared = (Segment.last(setup.files(record.number)).compared for record in left)
    return max(compared, default=0)


def _name_of(sweep: str, trial: Any) -> str:
    return trial_name(sweep, trial.config[NUMBER])


class _Sweep:
    """One attempt at a sweep."""

    def __init__(
        self,
        sweep: SweepConfig,
        base: AnyConfig,
        files: RunFiles,
        plan: SweepPlan,
        stop: StopOnRequest,
    ) -> None:
        self._sweep, self._base, self._files, self._plan = sweep, base, files, plan
        self._goal, self._stop = Goal.of(sweep), stop
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
        scheduler = scheduler_of(
            self._sweep,
            self._base,
            past={record.number: self._reports_of(record) for record in self._left},
            last_comparison=self._last_comparison,
        )
        if not self._setup.is_population:  # pbt compares only trials that still run
            tell_past(scheduler, {each.name: self._reports_of(each) for each in self._ended})
        open_folder(self._files.location, TUNE_FOLDER).remove()
        name_of = partial(_name_of, self._sweep.name)
        param_space, search = self._trials()
        fit_trials(
            run_trial,
            self._setup,
            self._base,
            self._files,
            self._plan,
            param_space=param_space,
            tune_config=tune.TuneConfig(
                **search,
                scheduler=scheduler,
                trial_name_creator=name_of,
                trial_dirname_creator=name_of,
            ),
            run_config=tune.RunConfig(callbacks=[self._board], verbose=0),
            stop=self._stop,
        )

    def _reports_of(self, record: TrialRecord) -> list[dict[str, float]]:
        """Return a trial's earlier reports, without those that it will repeat."""
        files = self._setup.files(record.number)
        last_step = record.step if record.has_ended else newest_step(files)
        return reports_of(files, self._goal, last_step=last_step)

    def _trials(self) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return Tune's space, and the arguments of TuneConfig that select the trials to run."""
        if self._sweep.searcher != "optuna":
            return listed_space(self._sweep, self._ended, self._left), {}
        return None, {
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
                f"{len(self._ended)} trials are done, {len(self._left)} had started and are resumed"
            )
        self._view.message(f"files in {self._files.location}; Ray dashboard: {dashboard_url()}")

    def _tell(self, outcome: Outcome) -> None:
        for line in outcome.lines():
            self._view.message(line)
