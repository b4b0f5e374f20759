"""Health of a run, ended or not, from the files of its folder."""

from __future__ import annotations

import time
from collections.abc import Sequence

from raypo.doctor.result import Result, fault, ok, skipped
from raypo.health.rules import RULES, findings
from raypo.health.slowness import slowness
from raypo.storage.run_files import RunFiles
from raypo.storage.run_state import no_run, progress, run_status


def run_health(location: str) -> list[Result]:
    """Check the metrics of a run against all rules. A rule that matches is a fault.

    Args:
        location: Folder or URI of the run.

    Raises:
        ConfigError: there is no run.
    """
    files = RunFiles.at(location)
    status = run_status(files, time.time())
    if status is None:
        raise no_run(location)
    config, rows = files.config() or {}, files.metrics()
    results = [ok(f"{status.name}, {status.status}, {progress(status)}", check="run")]
    for finding in findings(rows, config):
        text = f"step {finding.step}: {finding.text}"
        results.append(fault(text, remedy=finding.remedy, check=finding.rule))
    if why := slowness(rows, config):
        results.append(ok(why.text, check="speed"))
    elif not rows:
        results.append(skipped("no step has ended yet", check="speed"))
    return results


def health_verdict(results: Sequence[Result]) -> str:
    """Return the summary line."""
    count = sum(result.status == "fault" for result in results)
    if count:
        return f"{count} alarm{'s' * (count > 1)}: see what is wrong above, and what to change."
    return f"none of {len(RULES)} rules matches."
