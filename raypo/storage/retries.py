"""Retries of reads and writes after temporary errors: a full disk, a URI that does not answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

WAITS_S = (5.0, 15.0, 45.0)
"""Seconds to wait before the second, third and fourth attempt. There is no fifth attempt."""
_LASTING = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors that another attempt would not fix."""


class StorageError(RuntimeError):
    """All attempts at a read or write failed."""


def write_text(path: Path, text: str) -> None:
    """Write a text file. If this fails, retry it as `retried` does."""
    retried(lambda: path.write_text(text), f"writing {path.name}")


def retried(
    work: Callable[[], T], what: str, *, tell: Callable[[str], None] = lambda message: None
) -> T:
    """Call `work` and return its result. If it raises an OSError, retry it a few times.

    Args:
        work: Function that can be repeated from its beginning. It must not wait for other workers.
        what: Description of the work for messages, like `writing metrics.jsonl`.
        tell: Callback for a message about each failed attempt. The message is also logged.

    Raises:
        StorageError: the last attempt failed.
        OSError: a file or a permission is missing. Such errors are not retried.
    """
    for wait_s in WAITS_S:
        try:
            return work()
        except _LASTING:
            raise
        except OSError as error:
            message = f"warning: {what} failed ({error}); next attempt in {wait_s:g} s"
            logging.getLogger(__name__).warning(message)
            tell(message)
            time.sleep(wait_s)
    try:
        return work()
    except OSError as error:
        raise StorageError(
            f"{what} failed {len(WAITS_S) + 1} times in {sum(WAITS_S):g} s, the last time with: "
            f"{error}. Free some space or bring the storage back, and start the run again: it goes "
            f"on from its last checkpoint."
        ) from error
