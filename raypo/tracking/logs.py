"""Redirect the log output of libraries to a file, so that the console stays readable."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from raypo.custom.errors import is_library

_SHOWN = 120
"""Maximum number of characters of a printed text that the console shows."""
_CALLBACKS = "raypo.run.callbacks"
"""Module that calls the user's callbacks."""
_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"


CONSOLE_KEY = "raypo_console_key"
"""Attribute of log records that the console shows too. Its value identifies the event: processes
that report the same event give it the same key."""


class _RunLog(logging.FileHandler):
    """Handler that `log_to_file` installs. It has its own class so that later calls can find it."""

    on_print: Callable[[str], None] | None = None
    """Callback `(line)` that shows prints of the user's code. Ray Train turns them into records of
    the root logger. None means that no print is shown."""
    on_event: Callable[[str, str], None] | None = None
    """Callback `(key, line)` for records with a `CONSOLE_KEY`."""
    _has_shown = False
    """True once a print of a user's function other than a callback was shown."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("Reporting training result"):
            return  # Ray Train's: 70 metrics a step, which metrics.jsonl has
        super().emit(record)
        key = getattr(record, CONSOLE_KEY, None)
        if key is not None and self.on_event is not None:
            self.on_event(key, record.getMessage())
        if record.name != "root" or self.on_print is None:
            return
        caller, text = _users_caller(), record.getMessage().strip()
        # Show everything that callbacks print: they run once a step, and often serve to print.
        if caller == _CALLBACKS:
            self.on_print(f"printed: {text}")
        elif caller is not None and not self._has_shown:
            self._has_shown = True
            self.on_print(f"printed: {text:.{_SHOWN}} (this and what follows: {self.baseFilename})")


def log_to_file(
    path: str | Path,
    *,
    on_print: Callable[[str], None] | None = None,
    on_event: Callable[[str, str], None] | None = None,
) -> None:
    """Redirect the log records and warnings of this process from the console to a file.

    Idempotent. Call it again after importing a library that sets up its own logger (vLLM,
    DeepSpeed). A call with another path continues the log in that file. Records below INFO are
    dropped.

    Args:
        path: Log file to append to; its folder is created.
        on_print: Callback `(line)` that shows prints of the user's code. It gets all prints of the
            user's callbacks. Of the user's other functions it gets only the first print, with the
            name of the log file. Ray Train turns each `print` in its workers into a record of the
            root logger, which libraries do not use.
        on_event: Callback `(key, line)` that shows events of raypo, such as a lost replica.
    """
    handler = _handler(Path(path).absolute())
    if on_print is not None:
        handler.on_print = on_print
    if on_event is not None:
        handler.on_event = on_event
    root = logging.getLogger()
    for logger in {root, *_loggers_apart()}:
        for old in list(logger.handlers):
            if old is not handler and (isinstance(old, _RunLog) or _writes_to_console(old)):
                logger.removeHandler(old)
        if logger is root or not logger.propagate:
            logger.addHandler(handler)  # a no-op if the logger has it already
    if root.getEffectiveLevel() > logging.INFO:
        root.setLevel(logging.INFO)
    logging.captureWarnings(True)


def _handler(path: Path) -> _RunLog:
    """Return the root logger's handler for this path, or a new one."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _RunLog):
            if handler.baseFilename == str(path):
                return handler
            handler.close()
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _RunLog(path, encoding="utf-8")
    handler.setLevel(logging.INFO)
    handler.setFormatter(logging.Formatter(_FORMAT))
    return handler


def _loggers_apart() -> list[logging.Logger]:
    """Return the loggers that have their own handlers or do not propagate."""
    return [
        logger
        for logger in logging.root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger) and (logger.handlers or not logger.propagate)
    ]


def _users_caller() -> str | None:
    """Return the module of raypo that called the user's code which prints.

    The result is empty if no module of raypo called the user's code. It is None if a library
    prints, for example DeepSpeed (compiler commands) or `datasets` (bytecode).
    """
    is_users = False
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if package == "raypo" and module != __name__:
            return module if is_users else None
        if package not in ("logging", "ray", "raypo"):
            is_users |= not is_library(frame.f_code.co_filename)
        frame = frame.f_back
    return "" if is_users else None


def _writes_to_console(handler: logging.Handler) -> bool:
    stream = getattr(handler, "stream", None)
    return stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__) or getattr(
        stream, "name", None
    ) in ("<stdout>", "<stderr>")
