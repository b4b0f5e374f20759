"""The machine room that all recipes share: what a worker opens, reports, saves and closes."""

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
from raypo.cluster.messenger import MonitorClient
from raypo.cluster.out_of_memory import LEARNER_REMEDY, memory_advice
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
    """What a checkpoint holds besides the run's own state: a learner."""

    def save(self, directory: Path) -> None:
        """Write everything that the next update depends on, this worker's part of it."""
        ...

    def restore(self, directory: Path) -> None:
        """Read what `save` wrote."""
        ...


@dataclass
class Run(ABC, Generic[AnyConfig]):
    """One worker's view of a run that is going on; every method is called by all workers.

    A recipe's own run adds what it reads and keeps: `prepare`, `state_dict`, `load_state_dict`
    and `save_models`.
    """

    config: AnyConfig
    runtime: Runtime
    workers: Workers
    files: RunFiles
    tell: MonitorClient
    last_step: int = field(default=0, kw_only=True)
    """The last step that is done."""
    interrupted: bool = field(default=False, kw_only=True)
    _sinks: Sinks = field(default_factory=lambda: Sinks([]), kw_only=True)
    _initial: dict[str, float] = field(default_factory=dict, kw_only=True)
    """Figures from before the first update; they stand in the first step's metrics."""
    started: float = field(default_factory=time.monotonic, kw_only=True)
    """When the driver began, by this process's monotonic clock; without a driver, this worker."""
    _earlier_s: float = field(default=0.0, kw_only=True)
    """Seconds that earlier attempts took, up to their checkpoint."""
    _step_started: float = field(default=0.0, kw_only=True)
    _sampled: Sequence[ScoredRollout] = field(default=(), init=False)
    """What this worker sampled in the step, for callbacks; of most recipes nothing."""
    _callbacks: dict[str, Callable[[StepView], Any]] = field(default_factory=dict, init=False)
    _best: Watched | None = field(default=None, init=False)
    """Of `checkpoint.best_by`."""
    _watched: Watched | None = field(default=None, init=False)
    """Of `stop.metric`."""
    _unseen: dict[str, str] = field(default_factory=dict, init=False)
    """Config key -> metric: those that are watched and of which no step has told whether they are.
    """
    _models: set[str] = field(default_factory=set, init=False)
    """Names of the folders that were written into the run's."""
    _writer: BackgroundWriter | None = field(default=None, init=False)
    """Writes what no later part of a step reads."""

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
        """Why the rules of `stop` say that the run is done; None: it goes on."""
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
        """The run with its data read; wrong data ends it here, before a model is loaded."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What the recipe carries from step to step besides its learner, as plain JSON."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""

    @abstractmethod
    def save_models(self, learner: Any) -> None:
        """Write the trained models as Hugging Face folders."""

    def spans_beside(self) -> list[Span]:
        """What this worker did beside the step since it was last asked; most recipes nothing."""
        return []

    def save_share(self, directory: Path) -> None:
        """Write into a checkpoint what this worker keeps besides; most recipes keep nothing."""

    def restore_share(self, directory: Path) -> None:
        """Read what `save_share` wrote, in a run of the same config."""

    def before_saving(self) -> None:
        """Make the learner ready to be saved; most recipes have nothing to do."""

    def restore(self, learner: Saveable) -> None:
        """Go on from the run's last checkpoint where there is one, else from another run's.

        Without either the run starts with clean files.
        """
        # Once more: DeepSpeed and transformers have brought loggers of their own.
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
        """The steps that are left, counted from 1; ends early when the driver wants to stop."""
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
            if self.interrupted or self.stopped:  # `checkpoint_when_due` has seen to it
                return
            self._step_started = time.perf_counter()
            yield step

    def note_initial(self, metrics: dict[str, float]) -> None:
        """Keep an evaluation from before the first update: `eval/initial_*` of the first step."""
        self._initial = {
            name.replace("eval/", "eval/initial_"): value for name, value in metrics.items()
        }
        self._check_watched(metrics)
        if self._watched:
            self._watched = self._watched.seen(0, metrics)

    def checkpoint_when_due(
        self, step: int, learner: Saveable, metrics: dict[str, float]
    ) -> Checkpoint | None:
        """The whole state after a step that has a checkpoint, or when the run is to stop.

        Args:
            metrics: Of the step; those of callbacks are added.
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
        """Hand the step to Ray Train, the files and the console.

        Args:
            to_ray: Whether Ray Train hears of it; each time waits until its controller has polled
                the time before. A checkpoint always goes there.
        """
        metrics = self._initial | metrics
        self._initial = {}
        if self._writer:
            self._writer.wait()  # a step is complete once its metrics line is written: not before
        self.files.sync()  # the checkpoint counts once it is reported, so its rollouts go first
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
        """Write files of this step while it goes on; `report` waits for them.

        Args:
            write: Called in a thread with the workers in a group of the thread's own.
        """
        if self._writer is None:
            self._writer = BackgroundWriter(self.workers.beside())
        self._writer.submit(write)

    def speed(self, metrics: dict[str, float], step_s: float) -> dict[str, float]:
        """How long a step took, and how fast that was; asked of rank 0."""
        return speed_metrics(metrics, step_s)

    def finish(self) -> dict[str, Any]:
        """Write the summary and say how it ended."""
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
        """What callbacks add to a step's metrics; rank 0 asks them for all."""
        if not self._callbacks:
            return {}
        shares = self.workers.gather_first(list(self._sampled))
        added: dict[str, float] = {}
        if self.workers.rank == 0:
            rollouts = [each for share in shares for each in share]
            added = ask_callbacks(self._callbacks, StepView(step, dict(metrics), rollouts))
        return self.workers.broadcast(added)

    def _check_watched(self, metrics: dict[str, float]) -> None:
        """Say once, or refuse, that a watched metric is none of its kind's."""
        for key, metric in list(self._unseen.items()):
            if there := of_its_kind(metric, metrics):
                del self._unseen[key]
                if text := check_measured(key, metric, there):
                    self.tell.message(f"warning: {text}")

    def _keep_best(self) -> None:
        """The models that were saved now are the best so far: into `best/`."""
        best = self.files.best_dir
        # By whoever has written them: from here on they all stand there.
        models = set[str]().union(*self.workers.gather(self._models))

        def write(folder: Path) -> None:
            if self.workers.rank > 0:
                return
            for name in models - {best.name}:
                link_tree(self.files.folder / name, folder / name)
            (folder / BEST_STEP).write_text(json.dumps(self._best_of_all()))

        self.replace_folder(best, write)

    def _best_of_all(self) -> dict[str, Any] | None:
        """The best step so far, where one is; as the summary and `best/` tell it."""
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
            # Another run's last step takes the place of this one's.
            self.files.truncate(after_step=self.last_step if is_own else self.last_step - 1)
            done = [row["step"] for row in self.files.metrics()]
            if self.last_step not in done:  # killed between the checkpoint and its line
                self.files.append_metrics(self.last_step, state["metrics"])

    def replace_folder(
        self, final: Path, write: Callable[[Path], None], *, workers: Workers | None = None
    ) -> None:
        """Replace a model's folder; a whole one is there at every moment but one.

        Args:
            write: Called by the workers with the folder to write to; rank 0 of them writes.
            workers: Those that have the model; None: all.
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
    """Return a step's metrics as Ray Train is told them, with the score that ranks checkpoints.

    The score is the metric of `checkpoint.best_by` or its negative, so that more is better, and
    the lowest number where a step did not measure it. Left to itself, Ray 2.60 ranks a checkpoint
    without the metric as the best under the order `min` and deletes the real best, and it writes
    NaN as null, at which each later resume fails with a TypeError.
    """
    told = {"step": step, **metrics}
    if section.best_by is not None:
        value = metrics.get(section.best_by, math.nan) * (1 if section.best_mode == "max" else -1)
        told[SCORE] = value if math.isfinite(value) else -sys.float_info.max
    return told


def _move_into_place(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """Instead of Ray Train's copy: what was staged on the storage itself is only renamed."""
    storage: Any = ray.train.get_context().get_storage()
    check_shared(storage)
    target = Path(checkpoint_folder(storage, name))
    for path in [path for path in Path(checkpoint.path).rglob("*") if path.is_file()]:
        final = target / path.relative_to(checkpoint.path)
        final.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, final)
    return Checkpoint(path=str(target), filesystem=kept_runs(storage)[0])


def log_path(files: RunFiles, workers: Workers) -> Path:
    """Where a learner worker writes what libraries say."""
    return files.logs_dir / f"worker_{workers.rank}.log"


@contextmanager
def open_run(setup: dict[str, Any], kind: type[AnyRun]) -> Iterator[AnyRun]:
    """Everything that a worker needs before a model is loaded; wrong data ends the run here."""
    config, runtime = open_setup(setup)
    workers = Workers.current()
    tell = MonitorClient(runtime.monitor if workers.rank == 0 else None)
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        config = decided_together(config, workers, gpu_bytes=memory, tell=tell.message)
    waited_s = tell.begin_attempt(ray.util.get_current_placement_group())
    files = RunFiles(runtime.storage_path, runtime.name)
    log_to_file(log_path(files, workers), on_print=tell.message)
    torch.set_num_threads(config.learner.cpus_per_worker)
    check_capability(config.model.dtype)
    if runtime.janitor is not None and workers.rank == 0:
        runtime.janitor.hold.remote(runtime.monitor, ray.util.get_current_placement_group())
        runtime.janitor.end_turn.remote(runtime.name)
    run = kind.prepare(config, runtime, workers, files, tell)
    run.started -= waited_s
    try:
        with memory_advice(f"learner worker {workers.rank}", LEARNER_REMEDY):
            yield run
    finally:
        run.close()
