"""Results of checks, and the function that makes checks side by side.

Concurrency. Each check runs in a daemon thread. A thread cannot be killed, so a check that hangs is
given up at its limit, and ends with the process. What loads torch, models or the user's code runs
in a process of its own (`custom.in_subprocess`), which is killed at the limit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from raypo.concurrency import daemon_future
from raypo.config import ConfigError
from raypo.custom.in_subprocess import CallTooSlowError

LIMIT_S = 10.0
"""Time limit of a check. Checks take less than 5 s on a machine that is not overloaded."""
PROCESS_LIMIT_S = 60.0
"""Time limit of a process that loads torch, transformers or the user's code."""

Status = Literal["fault", "warning", "ok", "skipped"]
STATUSES: tuple[Status, ...] = ("fault", "warning", "ok", "skipped")
"""Statuses in the order in which they are printed."""


@dataclass(frozen=True)
class Result:
    """Result of a check."""

    status: Status
    """fault: the run would fail, or hang. warning: it would run, but slower than it could, or it
    may fail later. skipped: there was nothing to check."""
    found: str
    meaning: str = ""
    remedy: str = ""
    check: str = ""
    """Name of the check."""
    seconds: float = 0.0
    node: str = ""
    """Address of the node. Empty means the machine on which the command runs."""
    is_hung: bool = False
    """Whether the check was given up at its limit. Its thread may still be alive."""


ok, skipped = partial(Result, "ok"), partial(Result, "skipped")
warning, fault = partial(Result, "warning"), partial(Result, "fault")


@dataclass(frozen=True)
class Check:
    """A check, which `run_checks` calls in a thread."""

    name: str
    function: Callable[[], Result]
    """Function that makes the check. It may raise ConfigError, which is a fault."""
    limit_s: float = LIMIT_S


def run_checks(checks: Sequence[Check], *, node: str = "") -> list[Result]:
    """Make all checks at the same time, and return their results in the same order.

    Args:
        checks: The checks.
        node: Address of this node, for the results.
    """
    begin = time.monotonic()
    answers = [
        daemon_future(partial(_timed, check), name=f"doctor-{check.name}") for check in checks
    ]
    results = []
    for check, answer in zip(checks, answers, strict=True):
        left_s = check.limit_s - (time.monotonic() - begin)
        is_done = bool(wait([answer], max(0.0, left_s)).done)
        result = answer.result() if is_done else _hung(check)
        results.append(replace(result, check=check.name, node=node))
    return results


def _timed(check: Check) -> Result:
    begin = time.monotonic()
    try:
        result = check.function()
    except CallTooSlowError:
        return _hung(check)
    except ConfigError as error:
        result = refused(error)
    except Exception as error:
        result = warning(
            f"{type(error).__name__}: {error}",
            "This check itself failed, so nothing is known about its subject.",
            "Look at the error. If it is raypo's own, please report it.",
        )
    return replace(result, seconds=round(time.monotonic() - begin, 3))


def _hung(check: Check) -> Result:
    return fault(
        f"no answer within {check.limit_s:g} s; the check was ended",
        "The run would wait at the same point, perhaps without an end.",
        "Find out why it does not answer: a server that is down or busy, storage that hangs, or a "
        "process that waits.",
        seconds=check.limit_s,
        is_hung=True,
    )


def refused(error: Exception) -> Result:
    """Return the fault for an error with which a run would refuse to start.

    The error says `key (value): rule. Remedy.`
    """
    rule, _, remedy = re.sub(r"(?<=\.) (?=[A-Z])", "\n\n", str(error), count=1).partition("\n\n")
    meaning = "The run would refuse to start with this error."
    return fault(rule, meaning, remedy or "Correct the value in the run file.")
