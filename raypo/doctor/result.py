"""Results of checks, and the function that runs checks concurrently.

Concurrency. Each check runs in a daemon thread. A thread cannot be killed, so a check that exceeds
its limit is abandoned. Code that loads torch, models or user code runs in a subprocess
(`custom.in_subprocess`), which is killed.
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
"""Time limit of a subprocess that loads torch, transformers or the user's code."""

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
    """The observation."""
    meaning: str = ""
    """Consequence for a run."""
    remedy: str = ""
    """Instruction to the user."""
    check: str = ""
    """Name of the check."""
    seconds: float = 0.0
    node: str = ""
    """Address of the node. Empty means the machine on which the command runs."""
    is_hung: bool = False
    """True if the check exceeded its limit. Its thread may still be alive."""


ok, skipped = partial(Result, "ok"), partial(Result, "skipped")
warning, fault = partial(Result, "warning"), partial(Result, "fault")


@dataclass(frozen=True)
class Check:
    """A check, which `run_checks` calls in a thread."""

    name: str
    function: Callable[[], Result]
    """Function that runs the check. It may raise ConfigError, which is a fault."""
    limit_s: float = LIMIT_S


def run_checks(checks: Sequence[Check], *, node: str = "") -> list[Result]:
    """Run all checks concurrently. Return their results in the order of the checks.

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
            "The check itself crashed, so it says nothing about the run.",
            "Look at the error. If it comes from raypo, please report it.",
        )
    return replace(result, seconds=round(time.monotonic() - begin, 3))


def _hung(check: Check) -> Result:
    return fault(
        f"timed out after {check.limit_s:g} s",
        "The run would probably hang at the same point.",
        "Find what blocks: a server that is down or overloaded, hanging storage, or a waiting "
        "process.",
        seconds=check.limit_s,
        is_hung=True,
    )


def refused(error: Exception) -> Result:
    """Convert an error that would keep a run from starting into a fault.

    Its message has the form `key (value): rule. Remedy.`
    """
    rule, _, remedy = re.sub(r"(?<=\.) (?=[A-Z])", "\n\n", str(error), count=1).partition("\n\n")
    meaning = "The run would refuse to start with this error."
    return fault(rule, meaning, remedy or "Correct the value in the run file.")
