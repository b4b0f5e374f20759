"""Restore a run from a checkpoint, and save its checkpoints and trained models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray.train
from ray.train import Checkpoint, CheckpointConsistencyMode

from raypo.collectives import Workers
from raypo.rollout.async_rollouts import AsyncRollouts
from raypo.rollout.prompt_source import PromptSource
from raypo.run.records import Records
from raypo.run.run import Run
from raypo.storage.checkpoints import (
    BEST_STEP,
    MANIFEST,
    STATE,
    damages,
    digests,
    find_checkpoint,
    no_whole_checkpoint,
)
from raypo.storage.folder import link_tree, parent_and_name
from raypo.storage.retries import retried
from raypo.storage.run_files import RunFiles
from raypo.tracking.logs import log_to_file
from raypo.types import Rollout

_README = "README.txt"
ModelWriters = Mapping[str, Callable[[Path], None]]
"""Functions that write a model to a folder, by the folder's name in the run's folder. All workers
that train the model call its function; rank 0 of these workers writes."""
RolloutSource = PromptSource | AsyncRollouts
"""A source of rollouts whose position is a part of the state."""


class Saveable(Protocol):
    """A learner that can be saved to a checkpoint and restored."""

    def save(self, directory: Path) -> None:
        """Write this worker's part of the state that the next update depends on."""
        ...

    def restore(self, directory: Path) -> None:
        """Restore the state that `save` wrote."""
        ...


@dataclass
class Checkpoints:
    """Saving and restoring of a run. All workers call every method."""

    run: Run[Any]
    records: Records
    model_workers: Workers
    """The workers that train the same models as this one."""
    models: ModelWriters
    """Functions that write the models that this worker trains."""
    before_saving: Callable[[], None] = lambda: None
    """Callback that moves the learner's whole state back to its devices."""
    _models: set[str] = field(default_factory=set)
    """Names of the model folders that were written into the run's folder."""

    def restore(self, learner: Saveable, rollouts: RolloutSource | None = None) -> dict[str, Any]:
        """Restore the newest undamaged checkpoint of this run.

        If this run has no checkpoint yet, restore one of another run: `from_checkpoint`, or in
        population-based training the checkpoint of another trial. Without any checkpoint, start
        with clean files.

        Returns:
            The checkpoint's state, with the values given to `save_when_due`. It is empty if there
            is no checkpoint.

        Raises:
            DamagedCheckpointError: all checkpoints that were found are damaged.
        """
        run = self.run
        # Set up logging again, because DeepSpeed and transformers have added their own loggers.
        log_to_file(run.log_path, on_print=run.tell.message)
        damaged: dict[str, str] = {}
        for checkpoint, is_own in self._candidates():
            with ExitStack() as opened:
                directory = Path(
                    retried(
                        lambda: opened.enter_context(checkpoint.as_directory()),  # noqa: B023
                        f"reading {checkpoint.path}",
                        tell=run.tell.message,
                    )
                )
                mine = damages(directory, rank=run.workers.rank, count=run.workers.count)
                if problems := [each for of_one in run.workers.gather(mine) for each in of_one]:
                    damaged[checkpoint.path] = ", ".join(dict.fromkeys(problems))
                    run.tell.message(
                        f"warning: {checkpoint.path} is damaged and skipped: "
                        f"{damaged[checkpoint.path]}"
                    )
                    continue
                state = self._restore_from(directory, learner, rollouts, is_own=is_own)
            break
        else:
            if damaged:
                other = None if ray.train.get_checkpoint() else self._other()
                written_by = RunFiles.at(parent_and_name(other)[0]) if other else run.files
                raise no_whole_checkpoint(damaged, written_by, is_own=other is None)
            state = {}
            if run.workers.rank == 0:
                run.files.truncate(after_step=0)
        if run.workers.rank == 0:
            run.files.clear_stages()
        return state

    def _candidates(self) -> Iterator[tuple[Checkpoint, bool]]:
        """Yield the checkpoints to try, newest first, each with True if it is this run's own."""
        if (newest := ray.train.get_checkpoint()) is not None:
            yield newest, True
            committed = CheckpointConsistencyMode.COMMITTED
            known = ray.train.get_all_reported_checkpoints(consistency_mode=committed)
            for each in sorted(known, key=lambda each: each.metrics["step"], reverse=True):
                if each.checkpoint.path != newest.path:
                    yield each.checkpoint, True
        elif (other := self._other()) is not None:
            if self.run.runtime.resume_from is None:
                self.run.tell.message(f"starting from the state in {other}")
            yield Checkpoint(other), False

    def _other(self) -> str | None:
        """Return the location of another run's checkpoint to begin with."""
        place = self.run.config.from_checkpoint
        return self.run.runtime.resume_from or (None if place is None else find_checkpoint(place))

    def _restore_from(
        self, directory: Path, learner: Saveable, rollouts: RolloutSource | None, *, is_own: bool
    ) -> dict[str, Any]:
        run = self.run
        learner.restore(directory)
        state = json.loads((directory / STATE).read_text())
        before, now = state["workers"], run.workers.count
        if before != now:
            run.tell.message(
                f"the checkpoint of step {state['step']} was written by {_workers(before)} and "
                f"is resumed with {now}: results are equal up to rounding"
            )
        if rollouts is not None:
            rollouts.load_state_dict(state, run.workers)
            # Each worker has saved its own share of the rollouts. With another number of workers
            # these steps are sampled again.
            if is_own and before == now:
                rollouts.restore(directory, run.workers)
        self._restore_records(state, is_own=is_own)
        return state

    def save_when_due(
        self,
        step: int,
        metrics: dict[str, float],
        learner: Saveable,
        *,
        state: Mapping[str, Any],
        rollouts: RolloutSource | None = None,
        samples: Sequence[Rollout] = (),
    ) -> Checkpoint | None:
        """End the step. If a checkpoint is due (`Records.end_step`), save it and the models.

        The best models so far are linked into `best/`.

        Args:
            step: The step that has ended.
            metrics: Metrics of the step. The callbacks' metrics are added in place.
            learner: The learner.
            state: The recipe's further state, as plain JSON values.
            rollouts: Source of the rollouts, whose position in the prompts is saved.
            samples: This worker's samples of the step, for callbacks.

        Returns:
            The checkpoint, or None if none is due.
        """
        run, records = self.run, self.records
        if not records.end_step(step, metrics, samples):
            return None
        records.uploads.wait()
        self.before_saving()
        directory = run.files.new_stage()
        retried(
            lambda: learner.save(directory),
            f"writing the checkpoint of step {step}",
            tell=run.tell.message,
        )
        position = {}
        if rollouts is not None:
            rollouts.save(directory, run.workers)
            position = {"stream": rollouts.position()}
        if run.workers.rank == 0:
            of_run = {
                "step": step,
                "workers": run.workers.count,
                "metrics": records.initial | metrics,
                "wall_s": records.wall_s,
                "best": records.best and records.best.state_dict(),
                "watched": records.watched and records.watched.state_dict(),
            }
            (directory / STATE).write_text(json.dumps(of_run | position | dict(state)))
            (directory / _README).write_text(
                "The training state of a run, for resuming and from_checkpoint. It is not a "
                f"model:\nthe trained model is a Hugging Face folder in {run.files.location}\n"
                "(policy/ or reward_model/; best/ has that of the best step).\n"
            )
        self._write_manifest(directory)
        for name, write in self.models.items():
            self._replace_folder(run.files.folder / name, write, self.model_workers)
        if records.best is not None and records.best.best_step == step:
            self._link_best()
        return Checkpoint.from_directory(str(directory))

    def _write_manifest(self, directory: Path) -> None:
        """Write the digests of all files. All workers call this; each digests its own files."""
        workers = self.run.workers
        # A file's name ends with the rank of the worker that wrote it. Rank 0 wrote the rest.
        own = {path.name for path in directory.glob(f"*_{workers.rank}.*")}
        if workers.rank == 0:
            own |= {STATE, _README}
        shares = workers.gather(digests(directory, own))
        if workers.rank == 0:
            files = {name: each for share in shares for name, each in share.items()}
            (directory / MANIFEST).write_text(json.dumps(files, indent=1))

    def _restore_records(self, state: Mapping[str, Any], *, is_own: bool) -> None:
        run, records = self.run, self.records
        records.last_step = step = state["step"]
        if is_own:
            records.best = records.best and records.best.restored(state.get("best"))
            records.watched = records.watched and records.watched.restored(state.get("watched"))
        if is_own or run.runtime.resume_from is not None:
            records.earlier_s = state["wall_s"]
        if run.workers.rank == 0:
            # Keep the metrics line of the last step if it is this run's. For the checkpoint of
            # another run, the line is written below.
            run.files.truncate(after_step=step if is_own else step - 1)
            done = [row["step"] for row in run.files.metrics()]
            if step not in done:  # the run may have been killed before it wrote the line
                run.files.append_metrics(step, state["metrics"])

    def _link_best(self) -> None:
        """Link the models that were just saved, the best so far, into `best/`."""
        run, best = self.run, self.run.files.best_dir
        # Workers may write different models (policy and critic). The gather also waits for them.
        models = set[str]().union(*run.workers.gather(self._models))

        def write(folder: Path) -> None:
            if run.workers.rank > 0:
                return
            for name in models - {best.name}:
                link_tree(run.files.folder / name, folder / name)
            (folder / BEST_STEP).write_text(json.dumps(self.records.best_step))

        self._replace_folder(best, write, run.workers)

    def _replace_folder(self, final: Path, write: Callable[[Path], None], workers: Workers) -> None:
        """Replace a model's folder. A complete folder exists except between the renames."""
        self._models.add(final.name)
        new, old = (final.with_name(f"{final.name}.{word}") for word in ("new", "old"))
        if workers.rank == 0:
            for left_over in (new, old):
                shutil.rmtree(left_over, ignore_errors=True)
        write(new)
        if workers.rank == 0:
            if final.exists():
                final.rename(old)
            new.rename(final)
            shutil.rmtree(old, ignore_errors=True)


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
