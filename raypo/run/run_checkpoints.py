"""Restore a run from a checkpoint, and save its checkpoints and trained models."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointConsistencyMode
from torch import Tensor

from raypo.cluster.hardware import available_memory
from raypo.cluster.heartbeat import heartbeat
from raypo.collectives import Workers
from raypo.config.auto_values import SNAPSHOT_SHARE
from raypo.learner.export import Export, NamedWeights
from raypo.learner.host_copies import HostCopies, tensors_in
from raypo.learner.learner import Learner
from raypo.learner.state import StateFiles, write_tensors
from raypo.learner.supervised import SupervisedLearner
from raypo.pending_work import at_work
from raypo.run.checkpoint_writer import Staged
from raypo.run.records import Records
from raypo.run.rollouts import Rollouts
from raypo.run.run import Run
from raypo.storage.checkpoints import (
    BEST_STEP,
    STATE,
    damages,
    find_checkpoint,
    no_whole_checkpoint,
    write_manifest,
)
from raypo.storage.folder import link_tree, parent_and_name
from raypo.storage.retries import retried, write_text
from raypo.storage.run_files import RunFiles
from raypo.tracking.logs import log_to_file

_README = "README.txt"


@dataclass
class Checkpoints:
    """Checkpoints and models of a run. All workers call every method."""

    run: Run[Any]
    records: Records
    learner: Learner | SupervisedLearner[Any]
    model_workers: Workers
    """The workers that train the same models as this one."""
    exports: Mapping[str, Export]
    """The models that this worker trains, by the name of their folder in the run's folder."""
    rollouts: Rollouts | None = None
    """Source of the rollouts, whose position in the prompts is saved. Recipes on examples have
    none."""
    before_saving: Callable[[], None] = lambda: None
    """Callback that moves the learner's whole state back to its devices."""
    _copies: HostCopies = field(default_factory=HostCopies)
    """The snapshot that is being written beside the next steps, if there is one."""
    _is_beside: bool | None = None
    """True if checkpoints are written beside the next steps, False if within their step. None
    before the first one."""

    def restore(self) -> dict[str, Any]:
        """Restore the newest undamaged checkpoint of this run.

        If this run has no checkpoint yet, restore one of another run: `from_checkpoint`, or in
        population-based training the checkpoint of another trial. Without any checkpoint, start
        with clean files.

        Returns:
            The checkpoint's state, with the values given to `save`. It is empty if there is no
            checkpoint.

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
                share = damages(directory, rank=run.workers.rank, count=run.workers.count)
                if problems := list(chain.from_iterable(run.workers.gather(share))):
                    damaged[checkpoint.path] = ", ".join(dict.fromkeys(problems))
                    run.tell.message(
                        f"warning: {checkpoint.path} is damaged and skipped: "
                        f"{damaged[checkpoint.path]}"
                    )
                    continue
                state = self._restore_from(directory, is_own=is_own)
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
        limit_s = run.config.hang_limit_s
        run.at_end.enter_context(heartbeat(run.runtime.monitor, run.workers.rank, limit_s))
        return state

    def _candidates(self) -> Iterator[tuple[Checkpoint, bool]]:
        """Yield the checkpoints to try, newest first, each with True if it is this run's own."""
        if (newest := ray.train.get_checkpoint()) is not None:
            yield newest, True
            committed = CheckpointConsistencyMode.COMMITTED
            reported = ray.train.get_all_reported_checkpoints(consistency_mode=committed)
            for report in sorted(reported, key=lambda report: report.metrics["step"], reverse=True):
                if report.checkpoint.path != newest.path:
                    yield report.checkpoint, True
        elif (other := self._other()) is not None:
            if self.run.runtime.resume_from is None:
                self.run.tell.message(f"starting from the state in {other}")
            yield Checkpoint(other), False

    def _other(self) -> str | None:
        """Return the location of another run's checkpoint to begin with."""
        location = self.run.config.from_checkpoint
        return self.run.runtime.resume_from or (location and find_checkpoint(location))

    def _restore_from(self, directory: Path, *, is_own: bool) -> dict[str, Any]:
        run, rollouts = self.run, self.rollouts
        self.learner.restore(directory)
        state = json.loads((directory / STATE).read_text())
        before, now = state["workers"], run.workers.count
        if before != now:
            run.tell.message(
                f"the checkpoint of step {state['step']} was written by {_workers(before)} and "
                f"is resumed with {now}: results are equal up to rounding"
            )
        if rollouts is not None:
            rollouts.restore(directory, state, is_own=is_own)
        self._restore_records(state, is_own=is_own)
        return state

    @at_work("the checkpoint")
    def save(self, step: int, metrics: dict[str, float], state: Mapping[str, Any]) -> Staged:
        """Save a checkpoint and the models, and link the best models so far into `best/`.

        If RAM allows, only copies the state here; the files are written in the background during
        the next steps, after `Records.report`.

        Args:
            step: The step that has ended.
            metrics: Metrics of the step, for a run that is killed before it writes them.
            state: The recipe's further state, as plain JSON values.

        Returns:
            The checkpoint for `Records.report`.
        """
        run, records, rollouts = self.run, self.records, self.rollouts
        records.checkpoints.wait()
        self.before_saving()
        directory = run.files.new_stage()
        content = self.learner.state_files()
        if self._is_beside is None:
            self._is_beside = self._fits_beside(content)
        if self._is_beside:
            self._copies.restart()
            content = self._copies.of(content)
        position = {} if rollouts is None else {"stream": rollouts.save(directory)}
        if run.workers.rank == 0:
            of_run = {
                "step": step,
                "workers": run.workers.count,
                "metrics": records.initial | metrics,
                "wall_s": records.wall_s,
                "best": records.best and records.best.state_dict(),
                "watched": records.watched and records.watched.state_dict(),
            }
            write_text(directory / STATE, json.dumps(of_run | position | dict(state)))
            write_text(
                directory / _README,
                "The training state of a run, for resuming and from_checkpoint. It is not a "
                f"model:\nthe trained model is a Hugging Face folder in {run.files.location}\n"
                "(policy/ or reward_model/; best/ has that of the best step).\n",
            )
        best = records.best_step if records.best and records.best.best_step == step else None
        weights = {name: export.weights() for name, export in self.exports.items()}
        if not self._is_beside:
            self._write(step, directory, content, weights)
            # Workers may write different models (policy and critic). The gather also waits for
            # them.
            if best is not None:
                models = set[str]().union(*run.workers.gather(set(self.exports)))
                self._link_best(models, best)
            return Staged(directory, None)
        copies = {name: self._copied(named) for name, named in weights.items()}

        def write() -> None:
            of_models = {name: iter(named) for name, named in copies.items()}
            self._write(step, directory, content, of_models)
            if best is not None:
                self._link_best(self.exports, best)

        return Staged(directory, write)

    def _fits_beside(self, content: StateFiles) -> bool:
        """Return whether checkpoints are written beside the next steps. All workers call this."""
        run = self.run
        wanted = run.config.checkpoint.background
        is_first = self.model_workers.rank == 0
        size = sum(tensor.nbytes for tensor in tensors_in(content))
        size += sum(export.num_bytes for export in self.exports.values()) if is_first else 0
        everyone = run.workers.gather(
            (os.uname().nodename, size, available_memory(), is_first and bool(self.exports))
        )
        # If policy and critic have workers of their own and both are exported, two workers write
        # models, and `best/` needs the models of both. A trial waits for Tune after each step.
        if run.runtime.is_trial or sum(writes for *_, writes in everyone) > 1:
            return False
        if wanted != "auto":
            return wanted
        for node in {node for node, *_ in everyone}:
            needed = sum(size for at, size, *_ in everyone if at == node)
            free = min(free for at, _, free, _ in everyone if at == node)
            if needed > SNAPSHOT_SHARE * free:
                run.tell.message(
                    f"checkpoints are written within their step: a snapshot takes "
                    f"{needed / 1e9:.3g} GB of {free / 1e9:.3g} GB of free RAM on {node}"
                )
                return False
        return True

    def _copied(self, weights: NamedWeights) -> list[tuple[str, Tensor]]:
        """Copy a model's weights on rank 0. Other ranks only take part in gathering shards."""
        copies = []
        for name, tensor in weights:
            if self.model_workers.rank == 0:
                copies.append((name, self._copies.of(tensor)))
        return copies

    def _write(
        self, step: int, directory: Path, content: StateFiles, weights: Mapping[str, NamedWeights]
    ) -> None:
        """Write the files of the checkpoint, and the models."""
        run = self.run
        digested: dict[str, list[Any]] = {}
        for name, state in content.items():
            digested[name] = retried(
                lambda: write_tensors(directory / name, state),  # noqa: B023
                f"writing the checkpoint of step {step}",
                tell=run.tell.message,
            )
        write_manifest(directory, run.workers.rank, run.workers.count, digested)
        for name, named in weights.items():
            if self.model_workers.rank == 0:
                export = self.exports[name]
                self._replace_folder(
                    run.files.folder / name,
                    lambda folder: export.write(folder, named),  # noqa: B023
                )
            else:
                for _ in named:  # takes part in gathering shards
                    pass

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

    def _link_best(self, models: Iterable[str], best: Mapping[str, Any]) -> None:
        """Link the models that were just saved, the best so far, into `best/`. Rank 0 does it."""
        files = self.run.files

        def write(folder: Path) -> None:
            for name in models:
                link_tree(files.folder / name, folder / name)
            write_text(folder / BEST_STEP, json.dumps(best))

        if self.run.workers.rank == 0:
            self._replace_folder(files.best_dir, write)

    def _replace_folder(self, final: Path, write: Callable[[Path], None]) -> None:
        """Replace a model's folder. A complete folder exists except between the renames."""
        new, old = (final.with_name(f"{final.name}.{word}") for word in ("new", "old"))
        for left_over in (new, old):
            shutil.rmtree(left_over, ignore_errors=True)
        write(new)
        if final.exists():
            final.rename(old)
        new.rename(final)
        shutil.rmtree(old, ignore_errors=True)


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
