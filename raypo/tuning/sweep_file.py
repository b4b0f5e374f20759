"""Driver of a sweep file: a `Tuner` that resumes from the records of earlier attempts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

from ray import tune
from ray.tune.experiment import Trial

from raypo.cluster.connect import dashboard_url
from raypo.cluster.placement import takes_gpus
from raypo.cluster.resources import alive_nodes
from raypo.config import AnyConfig
from raypo.config.sweep_config import SweepConfig
from raypo.inputs import record_inputs
from raypo.ray_internals import replay_past_trials
from raypo.storage.checkpoints import newest_step
from raypo.storage.folder import open_folder
from raypo.storage.run_files import RunFiles
from raypo.tracking.console import Console
from raypo.tuning.board import Board
from raypo.tuning.capacity import SweepPlan, describe, plan_sweep
from raypo.tuning.experiment import Interruption, connected
from raypo.tuning.goal import Goal
from raypo.tuning.outcome import Outcome, write_outcome
from raypo.tuning.population import Segment
from raypo.tuning.record import TrialRecord, read_trials, write_trials
from raypo.tuning.schedule import Reports, reports_of, scheduler_of
from raypo.tuning.search import SweepSearcher
from raypo.tuning.sweep_folder import recorded_config, trial_files
from raypo.tuning.tuner import TUNE_FOLDER, Tuner


def run_sweep(
    sweep: SweepConfig, base: AnyConfig, files: RunFiles, *, fresh: bool = False
) -> Outcome:
    """Run the remaining trials of a sweep. The caller holds the sweep's lock.

    Args:
        sweep: Config of the sweep.
        base: Run config of a trial, without the values of the space.
        files: The sweep's folder, into which its config is written.
        fresh: Whether to remove an earlier sweep in the folder, after the check that trials fit.

    Raises:
        ConfigError: not even one trial fits the cluster.
    """
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"  # `Board` and the runs record everything
    message = "Stopping all trials; the same command resumes them from their last checkpoints."
    interruption, console = Interruption(), Console()
    with connected(base, interruption, message=message):
        nodes = alive_nodes()
        plan = plan_sweep(sweep, base, nodes, use_gpu=takes_gpus(base, nodes))
        if fresh:
            files.remove(kind="sweep")
        files.write_config(recorded_config(sweep, base))
        records = read_trials(files)
        for change in record_inputs(base, files, resumes=bool(records)):
            console.message(f"changed input, accepted: {change}")
        files.sync()
        for line in describe(sweep, plan):
            console.message(line)
        if records:
            num_ended = sum(record.has_ended for record in records)
            console.message(
                f"{num_ended} trials are done, {len(records) - num_ended} had started and are "
                "resumed"
            )
        console.message(f"files in {files.location}; Ray dashboard: {dashboard_url()}")
        outcome = _run(sweep, base, files, plan, interruption, records)
    for line in outcome.lines:
        console.message(line)
    return outcome


def _run(
    sweep: SweepConfig,
    base: AnyConfig,
    files: RunFiles,
    plan: SweepPlan,
    interruption: Interruption,
    records: list[TrialRecord],
) -> Outcome:
    """Run the trials that have not ended, and write the outcome."""
    goal, values, started_at = Goal.of(sweep), sweep.base_values(), time.monotonic()
    searcher = SweepSearcher(sweep, records)

    def write(records: Sequence[TrialRecord]) -> None:
        write_trials(files, records, goal)
        files.sync()

    def name_of(
        trial: Trial,
    ) -> str:  # Tune copies it for each trial; a bound method would copy the searcher
        return searcher.name_of(trial)

    board = Board(base, goal, plan, interruption=interruption, records=records, write=write)
    status = "failed"
    try:
        if searcher.num_trials:
            ended_records = [record for record in records if record.has_ended]
            unfinished = [record for record in records if not record.has_ended]
            scheduler = scheduler_of(
                sweep,
                base,
                past={record.name: past_reports(record, files, goal) for record in unfinished},
                last_comparison=last_comparison(trial_files(files, r.name) for r in unfinished),
            )
            if sweep.scheduler.kind != "pbt":  # pbt compares only trials that still run
                replay_past_trials(
                    scheduler, {r.name: past_reports(r, files, goal) for r in ended_records}
                )
            open_folder(files.location, TUNE_FOLDER).remove()
            tuner = Tuner(
                base,
                tune_config=tune.TuneConfig(
                    search_alg=searcher,
                    scheduler=scheduler,
                    num_samples=searcher.num_trials,
                    trial_name_creator=name_of,
                    trial_dirname_creator=name_of,
                ),
                run_config=tune.RunConfig(name=files.name, storage_path=sweep.storage_path),
            )
            tuner.run(plan, board, interruption, values=values, goal=goal)
        status = "interrupted" if interruption.is_wanted else "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        board.close()
        outcome = write_outcome(
            files,
            sweep,
            board.records,
            base=values,
            status=status,
            wall_s=time.monotonic() - started_at,
        )
    return outcome


def past_reports(record: TrialRecord, files: RunFiles, goal: Goal) -> Reports:
    """Return a trial's earlier reports, without the reports of steps that it will repeat."""
    trial_run = trial_files(files, record.name)
    return reports_of(
        trial_run, goal, last_step=record.step if record.has_ended else newest_step(trial_run)
    )


def last_comparison(unfinished: Iterable[RunFiles]) -> int:
    """Return the step of the last pbt comparison of an earlier attempt, or 0 if there is none.

    A comparison is complete as soon as one of the remaining trials has continued after it.
    """
    return max((Segment.last(files).compared for files in unfinished), default=0)
