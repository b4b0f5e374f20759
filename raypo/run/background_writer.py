"""Write the files of a step in the background.

Concurrency. Each worker has one writer thread, which runs the writes in the order of submission.
The main thread waits for it before it writes the step's metrics line. This line makes the step
complete, so all other files of the step must be written first.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from raypo.collectives import Workers


class BackgroundWriter:
    """Writer thread of this worker. The writer threads of all workers share a process group."""

    def __init__(self, workers: Workers) -> None:
        """Create the writer. Its thread starts with the first write.

        Args:
            workers: The workers in a process group that no other thread uses (`Workers.beside`).
        """
        self._workers = workers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raypo-files")
        self._pending: list[Future[None]] = []

    def submit(self, write: Callable[[Workers], None]) -> None:
        """Queue a write for the thread. All workers submit the same writes in the same order."""
        self._pending.append(self._thread.submit(write, self._workers))

    def wait(self) -> None:
        """Wait until everything submitted so far is written.

        Raises:
            Exception: the first error that a write raised.
        """
        pending, self._pending = self._pending, []
        for each in pending:
            each.result()

    def close(self) -> None:
        """Cancel the queued writes. A write that is running finishes; this does not wait for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)
