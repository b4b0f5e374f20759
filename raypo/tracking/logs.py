"""What libraries say goes into a file, so that the console stays readable."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

_SHOWN = 120
"""Characters of a first line that the console shows."""
_FORMAT = "%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"


class _RunLog(logging.FileHandler):
    """The handler of `log_to_file`: a class of its own, by which it is found again."""

    on_print: Callable[[str], None] | None = None
    """Called with a line on the first record of the root logger itself."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        is_print = record.name == "root" and not record.getMessage().startswith("gcc ")
        if is_print and self.on_print is not None:  # DeepSpeed prints how it calls its compiler
            report, self.on_print = self.on_print, None
            text = record.getMessage().strip()
            report(f"printed: {text:.{_SHOWN}} (this and what follows: {self.baseFilename})")


def log_to_file(path: str | Path, *, on_print: Callable[[str], None] | None = None) -> None:
    """Send the log records and warnings of this process to a file instead of the console.

    Works in any process. Calling it again is harmless, and needed after the import of a library
    that sets up a logger of its own (vLLM, DeepSpeed); another path moves the log there. What is
    less urgent than INFO is dropped.

    Args:
        path: Appended to; its folder is made.
        on_print: Called once, with a line for people, when a function of the user's prints; the
            line says where all of that is. Ray Train makes `print` in its workers a record of the
            root logger, which libraries do not use.
    """
    handler = _handler(Path(path).absolute())
    if on_print is not None:
        handler.on_print = on_print
    root = logging.getLogger()
    for logger in {root, *_loggers_apart()}:
        for old in list(logger.handlers):
            if old is not handler and (isinstance(old, _RunLog) or _writes_to_console(old)):
                logger.removeHandler(old)
        if logger is root or not logger.propagate:
            logger.addHandler(handler)  # adds it once only
    if root.getEffectiveLevel() > logging.INFO:
        root.setLevel(logging.INFO)
    logging.captureWarnings(True)


def _handler(path: Path) -> _RunLog:
    """The handler that the root logger has for this path already, else a new one."""
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
    """Loggers that have handlers of their own or keep their records to themselves."""
    return [
        logger
        for logger in logging.root.manager.loggerDict.values()
        if isinstance(logger, logging.Logger) and (logger.handlers or not logger.propagate)
    ]


def _writes_to_console(handler: logging.Handler) -> bool:
    stream = getattr(handler, "stream", None)
    return stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__) or getattr(
        stream, "name", None
    ) in ("<stdout>", "<stderr>")
