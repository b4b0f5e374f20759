"""Upload checkpoints and models to a URI while the next steps run.

Concurrency. `Records.report` passes Ray Train a checkpoint and the function that `begin` returned.
Ray Train calls this function in a thread of the worker. The main thread calls `wait` before it
writes models or another checkpoint, so that at most one upload is running. It also calls `wait`
before the run ends.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

import ray.train
from ray.train import Checkpoint

from raypo.ray_internals import checkpoint_folder, kept_runs
from raypo.storage.folder import copy_to
from raypo.storage.retries import retried
from raypo.storage.run_files import RunFiles

TOLD_AFTER_S = 30.0
"""Interval, in seconds, between messages while the run waits for an upload."""
RETRIED_WITHIN_S = 10.0
"""Seconds after which a failed upload has failed for good. Ray Train 2.60 retries some errors of
S3 (SLOW_DOWN, for example) twice, the second time after 2.4 s at most."""


class Uploads:
    """Uploads of one worker, at most one at a time."""

    def __init__(self, files: RunFiles, tell: Callable[[str], None]) -> None:
        self._files, self._tell = files, tell
        self._step = 0
        self._attempt: Future[None] | None = None  # of the last upload; a retry has its own

    def begin(self, step: int) -> Callable[[Checkpoint, str], Checkpoint]:
        """Return a function that uploads the models, and then moves a step's checkpoint to the URI.

        Args:
            step: Step of the checkpoint. The previous upload must have ended (`wait`).
        """
        self._step, self._attempt = step, (first := Future[None]())

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            # Ray Train calls this function again to retry the upload.
            self._attempt = attempt = Future[None]() if first.done() else first
            try:
                self._files.sync(models=True)
                uploaded = self._upload(checkpoint, name)
            except BaseException as error:
                attempt.set_exception(error)
                raise
            attempt.set_result(None)
            return uploaded

        return upload

    def wait(self) -> None:
        """Wait for the running upload, if there is one. Send messages if it takes long.

        Raises:
            StorageError: the upload has failed, after several attempts.
        """
        while (attempt := self._attempt) is not None:
            if not wait([attempt], timeout=TOLD_AFTER_S).done:
                self._tell(
                    f"waiting for the upload of the checkpoint of step {self._step} to "
                    f"{self._files.location}"
                )
                continue
            if attempt.exception() is not None:
                time.sleep(RETRIED_WITHIN_S)
            if self._attempt is attempt:
                return attempt.result()

    def _upload(self, checkpoint: Checkpoint, name: str) -> Checkpoint:
        storage = ray.train.get_context().get_storage()
        (system, _), target = kept_runs(storage), checkpoint_folder(storage, name)
        retried(lambda: system.create_dir(target), f"creating {target}", tell=self._tell)
        for path in sorted(Path(checkpoint.path).iterdir()):
            copy_to(path, f"{target}/{path.name}", system, tell=self._tell)
        # Ray Train would remove it later, when the run may have ended and its local files are gone.
        shutil.rmtree(checkpoint.path, ignore_errors=True)
        return Checkpoint(path=target, filesystem=system)
