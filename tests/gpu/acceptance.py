"""`make gpu`: every part of the acceptance, each in a process of its own, and a report.

Run it: python -m tests.gpu.acceptance [PART ...]; `more` is run only where it is asked for.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from raypo.plan.hardware import this_machine
from tests.gpu.parts import ALWAYS, PARTS, REPOSITORY

LIMIT_S = {"run": 1200.0, "several": 1200.0, "more": 3600.0}
"""Seconds after which a part that hangs is given up; all others have `USUAL_LIMIT_S`."""
USUAL_LIMIT_S = 600.0
REPORT = REPOSITORY / "runs" / "gpu" / "report.md"
NO_GPU = 2
"""Exit status where there is nothing to run on."""
COLUMNS = ("planned_gb", "measured_gb", "planned_s", "measured_s")


@dataclass(frozen=True)
class Outcome:
    """What became of a part."""

    part: str
    passed: bool
    seconds: float
    told: str
    """Its figures, or what it said last."""
    columns: Mapping[str, float] = field(default_factory=dict)
    """Those of its figures that have columns of their own."""


def run_part(part: str, command: Sequence[str], limit_s: float) -> Outcome:
    """Run a part in a process of its own, so that one that dies or hangs ends nothing else."""
    begin = time.perf_counter()
    process = psutil.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        for each in [*process.children(recursive=True), process]:  # a run's Ray has the GPU, too
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.communicate()
        return Outcome(part, False, limit_s, f"not done in {limit_s:g} s")
    finally:
        seconds = time.perf_counter() - begin
    (REPORT.parent / f"{part}.log").write_text(output + errors)
    lines = output.strip().splitlines()
    if process.returncode == 0 and lines:
        figures: dict[str, Any] = json.loads(lines[-1])
        columns = {name: figures.pop(name) for name in COLUMNS if name in figures}
        told = ", ".join(f"{name}: {_short(value)}" for name, value in figures.items())
        return Outcome(part, True, seconds, told, columns)
    said = (errors or output).strip().splitlines()
    told = said[-1] if said else f"exit status {process.returncode}"
    return Outcome(part, False, seconds, told)


def report(outcomes: Sequence[Outcome], device: str) -> str:
    """The page for people."""
    passed = sum(each.passed for each in outcomes)
    today = datetime.date.today().isoformat()
    seconds = sum(each.seconds for each in outcomes)
    lines = [
        "# raypo on a GPU",
        "",
        f"{device}, {today}: {passed} of {len(outcomes)} parts passed, in {seconds:.0f} s.",
        "",
        "| part | | seconds | memory planned, GB | measured, GB | step planned, s | measured, s "
        "| what it said |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        mark = "passed" if each.passed else "**failed**"
        numbers = [_short(each.columns[name]) if name in each.columns else "" for name in COLUMNS]
        told = each.told.replace("|", "/").replace("\n", " ")
        cells = [each.part, mark, f"{each.seconds:.0f}", *numbers, told]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(asked: Sequence[str]) -> int:
    """Exit status: 0 all passed, 1 some failed, 2 there is no GPU."""
    (node,) = this_machine()
    if not node.gpus:
        print("raypo: nvidia-smi finds no GPU on this machine, so there is nothing to accept.")
        return NO_GPU
    usual = [part.__name__ for part in ALWAYS] + ["several"] * (node.gpus > 1)
    outcomes: list[Outcome] = []
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    for part in asked or usual:
        print(f"{part} ...", flush=True)
        command = [sys.executable, "-m", "tests.gpu.parts", part]
        outcomes.append(run_part(part, command, LIMIT_S.get(part, USUAL_LIMIT_S)))
        print(f"  {'passed' if outcomes[-1].passed else 'FAILED'}: {outcomes[-1].told}", flush=True)
    device = f"{node.gpus} x {node.gpu.name}" if node.gpu else f"{node.gpus} GPUs"
    REPORT.write_text(report(outcomes, device))
    print(f"The report is {REPORT.relative_to(REPOSITORY)}; beside it is what each part printed.")
    return 0 if all(each.passed for each in outcomes) else 1


if __name__ == "__main__":
    unknown = set(sys.argv[1:]) - PARTS.keys()
    if unknown:
        sys.exit(f"raypo: no part {', '.join(unknown)}; there are {', '.join(PARTS)}.")
    sys.exit(main(sys.argv[1:]))
