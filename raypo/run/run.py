"""The machine room that all recipes share: what a worker opens, reports, saves and closes."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import ray.train
import ray.util
import torch
from ray.train import Checkpoint

from raypo.cluster.messenger import MonitorClient
from raypo.cluster.out_of_memory import LEARNER_REMEDY, memory_advice
from raypo.collectives import Workers
from raypo.config import RecipeConfig
from raypo.metrics.clock import Clock, Span
from raypo.run.rollout_metrics import speed_figures
from raypo.run.setup import Runtime, open_setup
from raypo.storage.run_files import RunFiles
from raypo.storage.summary import installed_versions, summarize
from raypo.tracking.logs import log_to_file
from raypo.tracking.sinks import Sinks
from raypo.tracking.trace import write_spans

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
        log_to_file(log_path(self.files, self.workers))
        own = ray.train.get_checkpoint()
        others = self.runtime.resume_from
        checkpoint = own or (Checkpoint(others) if others else None)
        if checkpoint is not None:
            with checkpoint.as_directory() as directory:
                self._restore(Path(directory), learner, is_own=own is not None)
        elif self.workers.rank == 0:
            self.files.truncate(after_step=0)

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
            if self.interrupted:  # asked for during a step: `checkpoint_when_due` has seen to it
                return
            self._step_started = time.perf_counter()
            yield step

    def note_initial(self, figures: dict[str, float]) -> None:
        """Keep an evaluation from before the first update: `eval/initial_*` of the first step."""
        self._initial = {
            name.replace("eval/", "eval/initial_"): value for name, value in figures.items()
        }

    def checkpoint_when_due(
        self, step: int, learner: Saveable, metrics: dict[str, float]
    ) -> Checkpoint | None:
        """The whole state after a step that has a checkpoint, or when the driver wants to stop."""
        self.last_step = step
        self.interrupted = self.workers.broadcast(self.tell.stop_requested())
        if not (
            self.interrupted or self.config.checkpoint.is_due(step, last_step=self.config.num_steps)
        ):
            return None
        self.before_saving()
        directory = Path(tempfile.mkdtemp(prefix="raypo-checkpoint-"))
        learner.save(directory)
        self.save_share(directory)
        if self.workers.rank == 0:
            state = {
                "step": step,
                "metrics": self._initial | metrics,
                "wall_s": self._wall_s(),
                **self.state_dict(),
            }
            (directory / "run.json").write_text(json.dumps(state))
        self.save_models(learner)
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
        self.files.sync()  # the checkpoint counts once it is reported, so its rollouts go first
        if to_ray or checkpoint is not None:
            ray.train.report({"step": step, **metrics, **clock.laps}, checkpoint=checkpoint)
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

    def speed(self, metrics: dict[str, float], step_s: float) -> dict[str, float]:
        """How long a step took, and how fast that was; asked of rank 0."""
        return speed_figures(metrics, step_s)

    def finish(self) -> dict[str, Any]:
        """Write the summary and say how it ended."""
        is_done = self.last_step == self.config.num_steps
        status = "finished" if is_done else "interrupted"
        if self.workers.rank == 0:
            self.files.write_summary(
                summarize(
                    self.files.metrics(),
                    status=status,
                    recipe=self.config.recipe,
                    wall_s=self._wall_s(),
                    versions=installed_versions(),
                )
            )
            self.files.sync()
        return {"status": status, "step": self.last_step}

    def close(self) -> None:
        """Close what is open; safe to call in any state."""
        self._sinks.close()

    def _wall_s(self) -> float:
        return self._earlier_s + time.monotonic() - self.started

    def _restore(self, directory: Path, learner: Saveable, *, is_own: bool) -> None:
        learner.restore(directory)
        state = json.loads((directory / "run.json").read_text())
        self.load_state_dict(state)
        if is_own:
            self.restore_share(directory)
        self.last_step = state["step"]
        self._earlier_s = state["wall_s"]
        if self.workers.rank == 0:
            # Another run's last step takes the place of this one's.
            self.files.truncate(after_step=self.last_step if is_own else self.last_step - 1)
            done = [row["step"] for row in self.files.metrics()]
            if self.last_step not in done:  # killed between the checkpoint and its line
                self.files.append_metrics(self.last_step, state["metrics"])

    def replace_folder(self, final: Path, write: Callable[[Path], None]) -> None:
        """Replace a model's folder; a whole one is there at every moment but one.

        Args:
            write: Called by all workers with the folder to write to.
        """
        new, old = (final.with_name(f"{final.name}.{word}") for word in ("new", "old"))
        if self.workers.rank == 0:
            for left_over in (new, old):
                shutil.rmtree(left_over, ignore_errors=True)
        write(new)
        if self.workers.rank == 0:
            if final.exists():
                final.rename(old)
            new.rename(final)
            shutil.rmtree(old, ignore_errors=True)


def log_path(files: RunFiles, workers: Workers) -> Path:
    """Where a learner worker writes what libraries say."""
    return files.logs_dir / f"worker_{workers.rank}.log"


@contextmanager
def open_run(setup: dict[str, Any], kind: type[AnyRun]) -> Iterator[AnyRun]:
    """Everything that a worker needs before a model is loaded; wrong data ends the run here."""
    config, runtime = open_setup(setup)
    workers = Workers.current()
    tell = MonitorClient(runtime.monitor if workers.rank == 0 else None)
    waited_s = tell.begin_attempt(ray.util.get_current_placement_group())
    files = RunFiles(runtime.storage_path, runtime.name)
    log_to_file(log_path(files, workers))
    torch.set_num_threads(config.learner.cpus_per_worker)
    if runtime.janitor is not None and workers.rank == 0:
        runtime.janitor.hold.remote(runtime.monitor, ray.util.get_current_placement_group())
    run = kind.prepare(config, runtime, workers, files, tell)
    run.started -= waited_s
    try:
        with memory_advice(f"learner worker {workers.rank}", LEARNER_REMEDY):
            yield run
    finally:
        run.close()
