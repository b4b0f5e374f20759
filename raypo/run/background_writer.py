"""Files that are written in a thread while a step goes on.

One thread writes them in the order in which they were handed in. The step waits for it before its
line of metrics is written, for a step with a line has all its files.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from raypo.collectives import Workers


class BackgroundWriter:
    """One thread of this worker, and a process group of its own with those of the others."""

    def __init__(self, workers: Workers) -> None:
        """Start no thread yet.

        Args:
            workers: In a group that no other thread uses (`Workers.beside`).
        """
        self._workers = workers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raypo-files")
        self._pending: list[Future[None]] = []

    def submit(self, write: Callable[[Workers], None]) -> None:
        """Call `write` in the thread, after what was submitted before; all workers submit it."""
        self._pending.append(self._thread.submit(write, self._workers))

    def wait(self) -> None:
        """Wait until all is written.

        Raises:
            Exception: the first error of a write.
        """
        pending, self._pending = self._pending, []
        for each in pending:
            each.result()

    def close(self) -> None:
        """Begin nothing more; what is being written ends by itself."""
        self._thread.shutdown(wait=False, cancel_futures=True)
