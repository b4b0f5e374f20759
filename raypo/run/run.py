"""Base class of all recipes' runs: opening, checkpoints, metrics and closing on each worker."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import ray.train
import ray.util
import torch
from ray.train import Checkpoint

from raypo.cluster.devices import check_capability
from raypo.cluster.out_of_memory import LEARNER_REMEDY, memory_advice
from raypo.cluster.run_monitor import MonitorClient
from raypo.collectives import Workers
from raypo.config import CheckpointSection, RecipeConfig
from raypo.custom.loader import load_function
from raypo.metrics.clock import Clock, Span
from raypo.ray_internals import check_shared, checkpoint_folder, kept_runs
from raypo.run.background_writer import BackgroundWriter
from raypo.run.callbacks import StepView, ask_callbacks
from raypo.run.rollout_metrics import speed_metrics
from raypo.run.setup import Runtime, decided_together, open_setup
from raypo.run.watched import (
    Watched,
    best_in_words,
    check_measured,
    of_its_kind,
    reason_to_stop,
)
from raypo.storage.checkpoints import BEST_STEP, SCORE, STATE, damage_named, find_checkpoint
from raypo.storage.folder import link_tree
from raypo.storage.run_files import RunFiles
from raypo.storage.summary import installed_versions, summarize
from raypo.tracking.logs import log_to_file
from raypo.tracking.sinks import Sinks
from raypo.tracking.trace import write_spans
from raypo.types import ScoredRollout

AnyConfig = TypeVar("AnyConfig", bound=RecipeConfig)
AnyRun = TypeVar("AnyRun", bound="Run[Any]")


class Saveable(Protocol):
    """A learner that can be saved to a checkpoint and restored."""

    def save(self, directory: Path) -> None:
        """Write this worker's part of the state that the next update depends on."""
        ...

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote."""
        ...


@dataclass
class Run(ABC, Generic[AnyConfig]):
    """One worker's view of a run; all workers call every method.

    A recipe implements `prepare`, `state_dict`, `load_state_dict` and `save_models`.
    """

    config: AnyConfig
    runtime: Runtime
    workers: Workers
    files: RunFiles
    tell: MonitorClient
    last_step: int = field(default=0, kw_only=True)
    """The last completed step."""
    interrupted: bool = field(default=False, kw_only=True)
    _sinks: Sinks = field(default_factory=lambda: Sinks([]), kw_only=True)
    _initial: dict[str, float] = field(default_factory=dict, kw_only=True)
    """Metrics from before the first update; they are reported with the first step."""
    started: float = field(default_factory=time.monotonic, kw_only=True)
    """Start time of the driver (else of this worker) on this process's monotonic clock."""
    _earlier_s: float = field(default=0.0, kw_only=True)
    """Seconds that earlier attempts took, up to the checkpoint that was restored."""
    _step_started: float = field(default=0.0, kw_only=True)
    _sampled: Sequence[ScoredRollout] = field(default=(), init=False)
    """This worker's samples of the step, for callbacks. Empty in recipes that do not sample."""
    _callbacks: dict[str, Callable[[StepView], Any]] = field(default_factory=dict, init=False)
    _best: Watched | None = field(default=None, init=False)
    """The metric `checkpoint.best_by`. None if it is not set."""
    _watched: Watched | None = field(default=None, init=False)
    """The metric `stop.metric`. None if no stop rule is set."""
    _unseen: dict[str, str] = field(default_factory=dict, init=False)
    """Watched metrics by config key whose names were not yet checked against measured metrics."""
    _models: set[str] = field(default_factory=set, init=False)
    """Names of the model folders that were written into the run's folder."""
    _writer: BackgroundWriter | None = field(default=None, init=False)
    """Writes files that no later part of a step reads. None until the first of them."""

    def __post_init__(self) -> None:
        kept, stop = self.config.checkpoint, self.config.stop
        for path in self.config.callbacks:
            self._callbacks[path] = load_function(path, key="callbacks")
        if kept.best_by is not None:
            self._best = Watched(kept.best_by, kept.best_mode)
            self._unseen["checkpoint.best_by"] = kept.best_by
        if stop.watches:
            self._watched = Watched(stop.metric, stop.mode, stop.min_change)
            self._unseen["stop.metric"] = stop.metric

    @property
    def stopped(self) -> str | None:
        """Reason for which the rules of `stop` end the run. None means it goes on."""
        return reason_to_stop(self._watched, self.config.stop) if self._watched else None

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.runtime.name

    @classmethod
    @abstractmethod
    def prepare(
        cls,
        config: AnyConfig,
        runtime: Runtime,
        workers: Workers,
        files: RunFiles,
        tell: MonitorClient,
    ) -> Self:
        """Load the data and return the run. Bad data raises here, before a model is loaded."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the recipe's state besides the learner, as plain JSON values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    @abstractmethod
    def save_models(self, learner: Any) -> None:
        """Write the trained models as Hugging Face folders."""

    def spans_beside(self) -> list[Span]:
        """Return the time spans of background work since the last call. By default none."""
        return []

    def save_share(self, directory: Path) -> None:
        """Write this worker's further state to a checkpoint. By default there is none."""

    def restore_share(self, directory: Path) -> None:
        """Read what `save_share` wrote. Called only for this run's own checkpoints."""

    def before_saving(self) -> None:
        """Prepare the learner for saving. By default there is nothing to do."""

    def restore(self, learner: Saveable) -> None:
        """Restore the run's last checkpoint, else one of another run, else start with clean files.

        The other run's is `from_checkpoint`, or another trial's in population-based training.
        """
        # Once more, because DeepSpeed and transformers have added their own loggers since.
        log_to_file(log_path(self.files, self.workers), on_print=self.tell.message)
        own = ray.train.get_checkpoint()
        others = self.runtime.resume_from
        if own is None and others is None and self.config.from_checkpoint is not None:
            others = find_checkpoint(self.config.from_checkpoint)
            self.tell.message(f"beginning with the state in {others}")
        checkpoint = own or (Checkpoint(others) if others else None)
        if checkpoint is not None:
            with checkpoint.as_directory() as directory:
                self._restore(Path(directory), learner, is_own=own is not None)
        elif self.workers.rank == 0:
            self.files.truncate(after_step=0)
        if self.workers.rank == 0:
            self.files.clear_stages()

    def steps(self) -> Iterator[int]:
        """Yield the remaining steps, counted from 1. Ends early if the driver or a rule stops."""
        first = self.last_step + 1
        if self.workers.rank == 0:
            self._sinks = Sinks.open(
                self.config.logging,
                folder=self.files.folder,
                name=self.name,
                config=self.config.model_dump(mode="json"),
                first_step=first,
            )
        self.tell.start(first)
        self.interrupted = self.workers.broadcast(self.tell.stop_requested())
        for step in range(first, self.config.num_steps + 1):
            if self.interrupted or self.stopped:  # `checkpoint_when_due` has saved the state
                return
            self._step_started = time.perf_counter()
            yield step

    def note_initial(self, metrics: dict[str, float]) -> None:
        """Keep the metrics of the initial evaluation, to report them as `eval/initial_*`."""
        self._initial = {
            name.replace("eval/", "eval/initial_"): value for name, value in metrics.items()
        }
        self._check_watched(metrics)
        if self._watched:
            self._watched = self._watched.seen(0, metrics)

    def checkpoint_when_due(
        self, step: int, learner: Saveable, metrics: dict[str, float]
    ) -> Checkpoint | None:
        """Call the callbacks, and save a checkpoint if one is due or the run stops.

        A checkpoint is also saved when `checkpoint.best_by` has improved.

        Args:
            step: The step that has ended.
            learner: The learner to save.
            metrics: Metrics of the step. Those of callbacks are added in place.

        Returns:
            The checkpoint. None if no checkpoint is due.
        """
        metrics |= self._called_back(step, metrics)
        self._check_watched(metrics)
        self.last_step = step
        self._best, self._watched, self.interrupted = self.workers.broadcast(
            (
                self._best and self._best.seen(step, metrics),
                self._watched and self._watched.seen(step, metrics),
                self.tell.stop_requested(),
            )
        )
        if self.stopped:
            self.tell.message(f"step {step}: {self.stopped}; the run is done")
        is_best = self._best is not None and self._best.best_step == step
        is_due = self.config.checkpoint.is_due(step, last_step=self.config.num_steps)
        if not (is_due or is_best or self.interrupted or self.stopped):
            return None
        self.before_saving()
        directory = self.files.new_stage()
        learner.save(directory)
        self.save_share(directory)
        if self.workers.rank == 0:
            state = {
                "step": step,
                "metrics": self._initial | metrics,
                "wall_s": self._wall_s(),
                "best": self._best and self._best.state_dict(),
                "watched": self._watched and self._watched.state_dict(),
                **self.state_dict(),
            }
            (directory / STATE).write_text(json.dumps(state))
        self.save_models(learner)
        if is_best:
            self._keep_best()
        return Checkpoint.from_directory(str(directory))

    def report(
        self,
        step: int,
        metrics: dict[str, float],
        clock: Clock,
        checkpoint: Checkpoint | None,
        *,
        to_ray: bool = True,
    ) -> None:
        """Report the step to Ray Train, the run's files and the console.

        Args:
            step: The step that has ended.
            metrics: Its metrics.
            clock: Times of its parts.
            checkpoint: Its checkpoint. None if it has none.
            to_ray: Whether to report to Ray Train, which blocks until its controller has polled
                the previous report. A step with a checkpoint is always reported there.
        """
        metrics = self._initial | metrics
        self._initial = {}
        if self._writer:
            self._writer.wait()  # a step with a metrics line must have all its files
        self.files.sync()  # a reported checkpoint counts, so its rollouts must be stored first
        if to_ray or checkpoint is not None:
            ray.train.report(
                report_for_ray(step, metrics | clock.laps, self.config.checkpoint),
                checkpoint=checkpoint,
                checkpoint_upload_fn=_move_into_place if self.files.is_local else None,
            )
        if checkpoint is not None:
            shutil.rmtree(checkpoint.path, ignore_errors=True)
        clock.lap("time/report_s")
        write_spans(self.files, self.workers.rank, step, clock.spans, self.spans_beside())
        if self.workers.rank > 0:
            return
        step_s = time.perf_counter() - self._step_started
        metrics |= clock.laps
        metrics |= self.speed(metrics, step_s)
        self.files.append_metrics(step, metrics)
        self._sinks.write(step, metrics)
        self.files.sync()
        self.tell.step({"step": step, **metrics})

    def write_later(self, write: Callable[[Workers], None]) -> None:
        """Write files of this step in the background; `report` waits for them.

        Args:
            write: Called in the writer thread, with the workers in that thread's process group.
        """
        if self._writer is None:
            self._writer = BackgroundWriter(self.workers.beside())
        self._writer.submit(write)

    def speed(self, metrics: dict[str, float], step_s: float) -> dict[str, float]:
        """Return the duration and the rates of a step. Only rank 0 calls it."""
        return speed_metrics(metrics, step_s)

    def finish(self) -> dict[str, Any]:
        """Write the summary, and return the run's status and last step."""
        if self._writer:  # of held-out samples before a first step that never came, say
            self._writer.wait()
        is_done = self.last_step == self.config.num_steps or self.stopped
        status = "finished" if is_done else "interrupted"
        own: dict[str, Any] = {"stopped": self.stopped} if self.stopped else {}
        if self._best and (best := self._best_of_all()):
            own["best"] = best
            self.tell.message(best_in_words(self._best, self.files.metrics()))
        if self.workers.rank == 0:
            self.files.write_summary(
                summarize(
                    self.files.metrics(),
                    status=status,
                    recipe=self.config.recipe,
                    wall_s=self._wall_s(),
                    versions=installed_versions(),
                )
                | own
            )
            self.files.sync()
        return {"status": status, "step": self.last_step}

    def close(self) -> None:
        """Close what is open; safe to call in any state."""
        if self._writer:
            self._writer.close()
        self._sinks.close()

    def _called_back(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Call the callbacks on rank 0; return the metrics that they add, on all workers."""
        if not self._callbacks:
            return {}
        shares = self.workers.gather_first(list(self._sampled))
        added: dict[str, float] = {}
        if self.workers.rank == 0:
            rollouts = [each for share in shares for each in share]
            added = ask_callbacks(self._callbacks, StepView(step, dict(metrics), rollouts))
        return self.workers.broadcast(added)

    def _check_watched(self, metrics: dict[str, float]) -> None:
        """Warn, or raise for a held-out metric, if a watched metric is not among those measured."""
        for key, metric in list(self._unseen.items()):
            if there := of_its_kind(metric, metrics):
                del self._unseen[key]
                if text := check_measured(key, metric, there):
                    self.tell.message(f"warning: {text}")

    def _keep_best(self) -> None:
        """Link the models that were just saved, the best so far, into `best/`."""
        best = self.files.best_dir
        # Workers may write different models (policy and critic). The gather also waits for them.
        models = set[str]().union(*self.workers.gather(self._models))

        def write(folder: Path) -> None:
            if self.workers.rank > 0:
                return
            for name in models - {best.name}:
                link_tree(self.files.folder / name, folder / name)
            (folder / BEST_STEP).write_text(json.dumps(self._best_of_all()))

        self.replace_folder(best, write)

    def _best_of_all(self) -> dict[str, Any] | None:
        """Return the best step for the summary and `best/`. None if there is none yet."""
        best = self._best
        if not best or not best.best_step:
            return None
        return {"metric": best.metric, "step": best.best_step, "value": best.best}

    def _wall_s(self) -> float:
        return self._earlier_s + time.monotonic() - self.started

    def _restore(self, directory: Path, learner: Saveable, *, is_own: bool) -> None:
        with damage_named(directory, self.files):
            learner.restore(directory)
            state = json.loads((directory / STATE).read_text())
        self.load_state_dict(state)
        if is_own:
            self.restore_share(directory)
            self._best = self._best and self._best.restored(state.get("best"))
            self._watched = self._watched and self._watched.restored(state.get("watched"))
        self.last_step = state["step"]
        is_continued = is_own or self.runtime.resume_from is not None
        self._earlier_s = state["wall_s"] if is_continued else 0.0
        if self.workers.rank == 0:
            # Keep the line of an own last step; one of another run's checkpoint is written below.
            self.files.truncate(after_step=self.last_step if is_own else self.last_step - 1)
            done = [row["step"] for row in self.files.metrics()]
            if self.last_step not in done:  # also if killed between the checkpoint and its line
                self.files.append_metrics(self.last_step, state["metrics"])

    def replace_folder(
        self, final: Path, write: Callable[[Path], None], *, workers: Workers | None = None
    ) -> None:
        """Replace a model's folder. At all times but between two renames a complete one exists.

        Args:
            final: The folder.
            write: Called on all these workers with the folder to write to; their rank 0 writes.
            workers: The workers that have the model. None means all.
        """
        rank = (workers or self.workers).rank
        self._models.add(final.name)
        new, old = (final.with_name(f"{final.name}.{word}") for word in ("new", "old"))
        if rank == 0:
            for left_over in (new, old):
                shutil.rmtree(left_over, ignore_errors=True)
        write(new)
        if rank == 0:
            if final.exists():
                final.rename(old)
            new.rename(final)
            shutil.rmtree(old, ignore_errors=True)


def report_for_ray(
    step: int, metrics: Mapping[str, float], section: CheckpointSection
) -> dict[str, float]:
    """Return a step's metrics for Ray Train, with the score that ranks checkpoints.

    The score is the metric of `checkpoint.best_by`, or its negative, so that higher is better.
    """
    told = {"step": step, **metrics}
    # A step that did not measure the metric gets the lowest score. Left to itself, Ray 2.60 ranks
    # such a checkpoint as the best under the order `min` and deletes the real best; and it writes
    # NaN as null, so that each later resume fails with a TypeError.
    if section.best_by is not None:
        value = metrics.get(section.best_by, math.nan) * (1 if section.best_mode == "max" else -1)
        told[SCORE] = value if math.isfinite(value) else -sys.float_info.max
    return told


def _move_into_place(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """Move a staged checkpoint into place by renaming, instead of Ray Train's copy.

    The files were staged on the run's storage itself.
    """
    storage: Any = ray.train.get_context().get_storage()
    check_shared(storage)
    target = Path(checkpoint_folder(storage, name))
    for path in [path for path in Path(checkpoint.path).rglob("*") if path.is_file()]:
        final = target / path.relative_to(checkpoint.path)
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, final)
    return Checkpoint(path=str(target), filesystem=kept_runs(storage)[0])


def log_path(files: RunFiles, workers: Workers) -> Path:
    """Return the log file of a learner worker, which gets the output of libraries."""
    return files.logs_dir / f"worker_{workers.rank}.log"


@contextmanager
def open_run(setup: dict[str, Any], kind: type[AnyRun]) -> Iterator[AnyRun]:
    """Set up a worker's run before a model is loaded, and close it at the end.

    Args:
        setup: The config as a dictionary, with the driver's additions.
        kind: The recipe's class.

    Yields:
        The run. Bad data raises before it is yielded.
    """
    config, runtime = open_setup(setup)
    workers = Workers.current()
    tell = MonitorClient(runtime.monitor if workers.rank == 0 else None)
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        config = decided_together(
            config, workers, runtime.decide, gpu_bytes=memory, tell=tell.message
        )
    waited_s = tell.begin_attempt(ray.util.get_current_placement_group())
    files = RunFiles(runtime.storage_path, runtime.name)
    log_to_file(log_path(files, workers), on_print=tell.message)
    torch.set_num_threads(config.learner.cpus_per_worker)
    check_capability(config.model.dtype)
    if runtime.group_gc is not None and workers.rank == 0:
        runtime.group_gc.hold.remote(runtime.monitor, ray.util.get_current_placement_group())
        runtime.group_gc.end_turn.remote(runtime.name)
    run = kind.prepare(config, runtime, workers, files, tell)
    run.started -= waited_s
    try:
        with memory_advice(f"learner worker {workers.rank}", LEARNER_REMEDY):
            yield run
    finally:
        run.close()
