"""Write a checkpoint and the models, and move or upload them, beside the next steps.

Concurrency. `Checkpoints.save` takes a snapshot in the main thread, with all collectives.
`Records.report` passes Ray Train the function that `begin` returned, and Ray Train calls it in a
thread of the worker, or in the main thread if it reports synchronously. The function waits for no
other worker. Ray Train lists a checkpoint once this function has returned on all workers, so every
listed checkpoint is whole. The main thread calls `wait` before the next snapshot, so at most one
checkpoint is being written. It also calls `wait` before the run ends.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.train
from ray.train import Checkpoint

from raypo.pending_work import Work, at_work, moved
from raypo.ray_internals import check_shared, checkpoint_folder, run_storage
from raypo.storage.folder import copy_to
from raypo.storage.retries import retried
from raypo.storage.run_files import RunFiles

LOOK_EVERY_S = 5.0
"""Interval, in seconds, at which a worker that waits for a checkpoint looks whether it moves."""
TOLD_AFTER_S = 30.0
"""Interval, in seconds, between messages while the run waits for a checkpoint."""
RETRIED_WITHIN_S = 10.0
"""Seconds after which a failed upload has failed for good. Ray Train 2.60 retries some errors of
S3 (SLOW_DOWN, for example) twice, the second time after 2.4 s at most."""


@dataclass(frozen=True)
class Staged:
    """A worker's part of a checkpoint, in a folder that Ray Train does not know yet."""

    folder: Path
    write: Callable[[], None] | None
    """Function that writes the files from a snapshot, in any thread. None if they are written."""


class CheckpointWriter:
    """The checkpoints of one worker, of which at most one is being written or uploaded."""

    def __init__(self, files: RunFiles, tell: Callable[[str], None]) -> None:
        self._files, self._tell = files, tell
        self._step = 0
        self._attempt: Future[None] | None = None  # of the last checkpoint; a retry has its own
        self._work: Work | None = None  # of the thread that writes or stores the checkpoint

    @property
    def is_busy(self) -> bool:
        """True while a checkpoint is being written or uploaded."""
        return self._attempt is not None and not self._attempt.done()

    def begin(self, step: int, staged: Staged) -> Callable[[Checkpoint, str], Checkpoint]:
        """Return the function that writes a step's checkpoint and moves it to its final location.

        At a URI it uploads the models, and then the checkpoint. The previous checkpoint must be
        complete (`wait`).
        """
        self._step, self._attempt = step, (first := Future[None]())
        is_written = staged.write is None

        def complete(checkpoint: Checkpoint, name: str) -> Checkpoint:
            # Ray Train calls this function again to retry the upload.
            nonlocal is_written
            self._attempt = attempt = Future[None]() if first.done() else first
            try:
                if staged.write is not None and not is_written:
                    with at_work(f"writing the checkpoint of step {step}") as self._work:
                        staged.write()
                    is_written = True
                storing = f"storing the checkpoint of step {step} in {self._files.location}"
                with at_work(storing) as self._work:
                    self._files.sync(models=True)
                    move = _move_into_place if self._files.is_local else self._upload
                    final = move(checkpoint, name)
            except BaseException as error:
                attempt.set_exception(error)
                raise
            # Ray Train would remove it later, when the run may have ended and its local files are
            # gone.
            shutil.rmtree(staged.folder, ignore_errors=True)
            attempt.set_result(None)
            return final

        return complete

    def forget(self) -> None:
        """Do not wait for the checkpoint that was begun last, because it was not reported."""
        self._attempt = None

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if any. Send messages if it takes long.

        The work of this context moves whenever the writing or storing does.

        Raises:
            StorageError: the checkpoint cannot be stored, after several attempts.
        """
        told_at = moved_at = time.monotonic()
        while (attempt := self._attempt) is not None:
            if not wait([attempt], timeout=min(LOOK_EVERY_S, TOLD_AFTER_S)).done:
                # Ray Train's thread has a context of its own, so its work does not move this one.
                if (work := self._work) is not None and work.moved_at > moved_at:
                    moved_at = work.moved_at
                    moved()
                if time.monotonic() - told_at >= TOLD_AFTER_S:
                    told_at = time.monotonic()
                    self._tell(
                        f"waiting until the checkpoint of step {self._step} is stored in "
                        f"{self._files.location}"
                    )
                continue
            if attempt.exception() is not None:
                time.sleep(RETRIED_WITHIN_S)
            if self._attempt is attempt:
                return attempt.result()

    def _upload(self, checkpoint: Checkpoint, name: str) -> Checkpoint:
        storage = ray.train.get_context().get_storage()
        (system, _), target = run_storage(storage), checkpoint_folder(storage, name)
        retried(lambda: system.create_dir(target), f"creating {target}", tell=self._tell)
        for path in sorted(Path(checkpoint.path).iterdir()):
            copy_to(path, f"{target}/{path.name}", system, tell=self._tell)
        return Checkpoint(path=target, filesystem=system)


def _move_into_place(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """Move a staged checkpoint into place by renaming its files. Ray Train would copy them.

    Renaming works because the files were staged on the run's own storage.
    """
    storage: Any = ray.train.get_context().get_storage()
    check_shared(storage)
    target = Path(checkpoint_folder(storage, name))
    target.mkdir(parents=True, exist_ok=True)
    for path in Path(checkpoint.path).iterdir():
        shutil.move(path, target / path.name)
    return Checkpoint(path=str(target), filesystem=run_storage(storage)[0])
