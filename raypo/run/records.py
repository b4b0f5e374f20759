"""Record the steps of a run: metrics, samples, callbacks, stop and checkpoint rules, and a summary.

Concurrency. Each worker has a writer thread, which writes the samples of a step while the main
thread goes on. The writer threads of all workers share a process group. `report` waits for them:
the metrics line makes a step complete, so all other files of the step must be written first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from raypo.collectives import Workers
from raypo.config import CheckpointSection
from raypo.custom.loader import load_function
from raypo.learner.state import NonFiniteUpdateError
from raypo.metrics.clock import Clock, Span
from raypo.pending_work import REPORT, at_work
from raypo.run.callbacks import StepView, ask_callbacks, by_name
from raypo.run.checkpoint_writer import CheckpointWriter, Staged
from raypo.run.rollout_metrics import sample_row, speed_metrics
from raypo.run.run import Run
from raypo.run.watched import (
    Watched,
    best_in_words,
    check_measured,
    of_its_kind,
    reason_to_stop,
)
from raypo.storage.checkpoints import score_of
from raypo.storage.retries import retried
from raypo.storage.rollout_table import merged, rollout_table
from raypo.storage.summary import installed_versions, summarize
from raypo.tracking.sinks import Sinks, Status
from raypo.tracking.trace import write_spans
from raypo.types import Rollout

Rows = Callable[[], list[dict[str, Any]]]
"""Function that returns this worker's rows for a file of samples."""


class Records:
    """Record of a run's steps and of their metrics. All workers call every method."""

    def __init__(self, run: Run[Any]) -> None:
        """Load the callbacks and the watched metrics of the config."""
        self._run, config = run, run.config
        self.last_step = 0
        """The last completed step."""
        self.best: Watched | None = None
        """The metric `checkpoint.best_by`, or None if it is not set."""
        self.watched: Watched | None = None
        """The metric `stop.metric`, or None if no stop rule is set."""
        self.initial: dict[str, float] = {}
        """Metrics from before the first update; they are reported with the first step."""
        self.earlier_s = 0.0
        """Seconds that earlier attempts took, up to the checkpoint that was restored."""
        self.checkpoints = CheckpointWriter(run.files, run.tell.message)
        """The checkpoint that is being written or uploaded, if there is one."""
        self._status: Status = "failed"  # until the run finishes
        self._interrupted = False
        self._step_started = 0.0
        self._sinks = Sinks([])
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="raypo-files")
        self._writers: Workers | None = None  # the threads' process group, created on demand
        self._pending: list[Future[None]] = []
        self.callbacks = {path: load_function(path, key="callbacks") for path in config.callbacks}
        """The user's callbacks by name, which rank 0 calls after each step."""
        self.callbacks |= by_name(run.runtime.callbacks)
        # Watched metrics, by config key, whose names were not yet compared with measured metrics.
        self._unseen: dict[str, str] = {}
        if config.checkpoint.best_by is not None:
            self.best = Watched(config.checkpoint.best_by, config.checkpoint.best_mode)
            self._unseen["checkpoint.best_by"] = config.checkpoint.best_by
        if config.stop.watches:
            stop = config.stop
            self.watched = Watched(stop.metric, stop.mode, stop.min_change)
            self._unseen["stop.metric"] = stop.metric
        run.at_end.callback(self._close)

    @property
    def stopped(self) -> str | None:
        """Reason for which the rules of `stop` end the run. None means that the run goes on."""
        return reason_to_stop(self.watched, self._run.config.stop) if self.watched else None

    @property
    def wall_s(self) -> float:
        """Seconds that the run took so far, earlier attempts included."""
        return self.earlier_s + time.monotonic() - self._run.started

    @property
    def best_step(self) -> dict[str, Any] | None:
        """The best step for the summary and `best/`, or None if there is none yet."""
        best = self.best
        if not best or not best.best_step:
            return None
        return {"metric": best.metric, "step": best.best_step, "value": best.best}

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, counted from 1. End early if the driver or a rule stops it."""
        run, first = self._run, self.last_step + 1
        if run.workers.rank == 0:
            self._sinks = Sinks.open(
                run.config.logging,
                files=run.files,
                config=run.config.model_dump(mode="json"),
                first_step=first,
            )
        run.tell.start(first)
        self._interrupted = run.workers.broadcast(run.tell.stop_requested())
        for step in range(first, run.config.num_steps + 1):
            if self._interrupted or self.stopped:  # a checkpoint was due then
                return
            self._step_started = time.perf_counter()
            yield step

    def note_initial(self, metrics: dict[str, float]) -> None:
        """Keep the metrics of the initial evaluation, to report them as `eval/initial_*`."""
        self.initial = {
            name.replace("eval/", "eval/initial_"): value for name, value in metrics.items()
        }
        self._check_watched(metrics)
        if self.watched:
            self.watched = self.watched.seen(0, metrics)

    def write_samples(self, step: int, rows: Rows, *, held_out: bool = False) -> None:
        """Write all workers' rows to the step's file of samples, in the background."""
        if self._writers is None:
            self._writers = self._run.workers.with_new_group()
        work = partial(self._write_samples, step, rows, self._writers, held_out=held_out)
        self._pending.append(self._writer.submit(work))

    @contextmanager
    def keeping(self, step: int, samples: Sequence[Rollout]) -> Iterator[None]:
        """Write the samples with their scores if an update in this context is not finite."""
        try:
            yield
        except NonFiniteUpdateError:
            self._write_samples(step, partial(list, map(sample_row, samples)), self._run.workers)
            raise

    @at_work("the callbacks")
    def call_callbacks(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[Rollout]
    ) -> dict[str, float]:
        """Call the user's callbacks, and return the metrics that they add to the step.

        Args:
            step: The step.
            metrics: Metrics of the step so far.
            samples: This worker's samples of the step. Callbacks see those of all workers.
        """
        workers = self._run.workers
        shares = workers.gather_first(list(samples))
        added: dict[str, float] = {}
        if workers.rank == 0:
            rollouts = list(chain.from_iterable(shares))
            added = ask_callbacks(self.callbacks, StepView(step, dict(metrics), rollouts))
        return workers.broadcast(added)

    def check_stop_rules(self, step: int, metrics: Mapping[str, float]) -> None:
        """Update the best step and the rules of `stop`, and ask whether the driver stops the run.

        Step `step` is then the last completed one. `steps` ends the run.
        """
        run = self._run
        self._check_watched(metrics)
        self.last_step = step
        self.best, self.watched, self._interrupted = run.workers.broadcast(
            (
                self.best and self.best.seen(step, metrics),
                self.watched and self.watched.seen(step, metrics),
                run.tell.stop_requested(),
            )
        )
        if self.stopped:
            run.tell.message(f"step {step}: {self.stopped}; the run is done")

    def is_checkpoint_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after the step.

        The reasons are that the checkpoint interval has passed, that `checkpoint.best_by` has
        improved, that the run stops, or that one of the run's nodes is about to be preempted.
        """
        run = self._run
        # All workers call this: Ray Train returns rank 0's information to each of them.
        if is_leaving := ray.train.get_preemption_info() is not None:
            run.tell.message(
                f"step {step}: a node is about to be preempted, so a checkpoint is saved"
            )
        is_best = self.best is not None and self.best.best_step == step
        is_periodic = run.config.checkpoint.is_due(step, last_step=run.config.num_steps)
        return is_periodic or is_best or is_leaving or self._interrupted or bool(self.stopped)

    def report(
        self,
        step: int,
        metrics: dict[str, float],
        clock: Clock,
        staged: Staged | None,
        *,
        spans: Sequence[Span] = (),
        rates: Callable[[Mapping[str, float]], dict[str, float]] = lambda metrics: {},
        to_ray: bool = True,
    ) -> None:
        """Report the step to Ray Train, the run's files and the console.

        Args:
            step: The step that has ended.
            metrics: Metrics of the step.
            clock: Times of the step's parts.
            staged: Checkpoint of the step. None means that none is saved.
            spans: Time spans of background work.
            rates: Function that derives further metrics from the step's. Only rank 0 calls it.
            to_ray: True to report to Ray Train. Such a report blocks until Ray Train's controller
                has polled the previous one. A step with a checkpoint is always reported.
        """
        run = self._run
        metrics = self.initial | metrics
        self.initial = {}
        self._wait_for_samples()
        # The run may resume from a reported checkpoint, so the step's rollouts must be stored
        # first. The models are uploaded together with the checkpoint.
        run.files.sync(models=False)
        if to_ray or staged is not None:
            self._report_to_ray(step, metrics | clock.laps, staged)
        clock.lap("time/report_s")
        write_spans(run.files, run.workers.rank, step, clock.spans, spans)
        if run.workers.rank > 0:
            return
        metrics |= clock.laps
        metrics |= speed_metrics(metrics, time.perf_counter() - self._step_started)
        metrics |= rates(metrics)
        run.files.append_metrics(step, metrics)
        self._sinks.write(step, metrics)
        run.files.sync(models=False)
        run.tell.step({"step": step, **metrics})

    def _report_to_ray(
        self, step: int, metrics: Mapping[str, float], staged: Staged | None
    ) -> None:
        run = self._run
        is_beside = self.checkpoints.is_busy
        complete, checkpoint = None, None
        if staged is not None:
            is_beside = staged.write is not None or not run.files.is_local
            complete = self.checkpoints.begin(step, staged)
            checkpoint = Checkpoint.from_directory(str(staged.folder))
        # Ray Train reports in order, so a synchronous report would wait for the last checkpoint.
        # Trials report synchronously nevertheless, so as not to run ahead of Tune's decisions.
        is_sync = run.runtime.is_trial or not is_beside
        try:
            with at_work(REPORT, must_move=False):
                ray.train.report(
                    report_for_ray(step, metrics, run.config.checkpoint),
                    checkpoint=checkpoint,
                    checkpoint_upload_mode=CheckpointUploadMode.SYNC
                    if is_sync
                    else CheckpointUploadMode.ASYNC,
                    checkpoint_upload_fn=complete,
                    delete_local_checkpoint_after_upload=False,  # `complete` does it
                )
        except BaseException:
            self.checkpoints.forget()
            raise

    def finish(self) -> dict[str, Any]:
        """Write the summary, and return the run's status and last step."""
        run = self._run
        self._wait_for_samples()  # held-out samples may still be queued if no step followed
        self.checkpoints.wait()
        is_done = self.last_step == run.config.num_steps or self.stopped
        status = "finished" if is_done else "interrupted"
        ending: dict[str, Any] = {"stopped": self.stopped} if self.stopped else {}
        if self.best and (best := self.best_step):
            ending["best"] = best
            run.tell.message(best_in_words(self.best, self._metrics()))
        if run.workers.rank == 0:
            run.files.write_summary(
                summarize(
                    self._metrics(),
                    status=status,
                    recipe=run.config.recipe,
                    wall_s=self.wall_s,
                    versions=installed_versions(),
                )
                | ending
            )
            run.files.sync()
        self._status = status
        return {"status": status, "step": self.last_step}

    def _metrics(self) -> list[dict[str, Any]]:
        """Return all rows of metrics, even if the storage fails for a moment."""
        files = self._run.files
        return retried(files.metrics, "reading metrics.jsonl", tell=self._run.tell.message)

    def _close(self) -> None:
        if self._status == "failed":  # an earlier step's checkpoint is whole nevertheless
            with suppress(Exception):
                self.checkpoints.wait()
        self._writer.shutdown(wait=False, cancel_futures=True)  # a write that runs finishes
        self._sinks.close(self._status)

    def _wait_for_samples(self) -> None:
        """Wait until all samples are written. Raise the first error of a write."""
        pending, self._pending = self._pending, []
        for write in pending:
            write.result()

    def _check_watched(self, metrics: Mapping[str, float]) -> None:
        """Warn if a watched metric was not measured. If it is a held-out metric, raise an error."""
        for key, metric in list(self._unseen.items()):
            if measured := of_its_kind(metric, metrics):
                del self._unseen[key]
                if text := check_measured(key, metric, measured):
                    self._run.tell.message(f"warning: {text}")

    def _write_samples(
        self, step: int, rows: Rows, workers: Workers, *, held_out: bool = False
    ) -> None:
        """Write all workers' rows; `workers` has the process group of the calling thread."""
        shares = workers.gather_first(rollout_table(rows()))
        if workers.rank == 0:
            self._run.files.write_rollouts(step, merged(shares), held_out=held_out)


def report_for_ray(
    step: int, metrics: Mapping[str, float], section: CheckpointSection
) -> dict[str, float]:
    """Return a step's metrics for Ray Train, with the score that ranks checkpoints."""
    score = score_of(metrics, best_by=section.best_by, best_mode=section.best_mode)
    return {"step": step, **metrics, **score}
