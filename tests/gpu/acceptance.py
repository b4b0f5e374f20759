"""`make gpu`: every part of the acceptance, each in a process of its own, and a report.

Run it: python -m tests.gpu.acceptance [PART ...]
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raypo.plan.hardware import this_machine
from tests.gpu.parts import PARTS, REPOSITORY

PART_TIMEOUT_S = 600
REPORT = REPOSITORY / "runs" / "gpu" / "report.md"
NO_GPU = 2
"""Exit status where there is nothing to run on."""


@dataclass(frozen=True)
class Outcome:
    """What became of a part."""

    part: str
    passed: bool
    seconds: float
    told: str
    """Its figures, or what it said last."""


def run_part(part: str, command: Sequence[str], timeout_s: float = PART_TIMEOUT_S) -> Outcome:
    """Run a part in a process of its own, so that one that dies or hangs ends nothing else."""
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(part, False, timeout_s, f"not done in {timeout_s:g} s")
    seconds, lines = time.perf_counter() - begin, done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        figures: Mapping[str, object] = json.loads(lines[-1])
        return Outcome(
            part, True, seconds, ", ".join(f"{k}: {_short(v)}" for k, v in figures.items())
        )
    said = (done.stderr or done.stdout).strip().splitlines()
    return Outcome(part, False, seconds, said[-1] if said else f"exit status {done.returncode}")


def report(outcomes: Sequence[Outcome], device: str) -> str:
    """The page for people."""
    passed = sum(each.passed for each in outcomes)
    today = datetime.date.today().isoformat()
    lines = [
        "# raypo on a GPU",
        "",
        f"{device}, {today}: {passed} of {len(outcomes)} parts passed.",
        "",
        "| part | | seconds | what it said |",
        "|---|---|---|---|",
    ]
    for each in outcomes:
        mark = "passed" if each.passed else "**failed**"
        told = each.told.replace("|", "/").replace("\n", " ")
        lines.append(f"| {each.part} | {mark} | {each.seconds:.0f} | {told} |")
    return "\n".join(lines) + "\n"


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(asked: Sequence[str]) -> int:
    """Exit status: 0 all passed, 1 some failed, 2 there is no GPU."""
    (node,) = this_machine()
    if not node.gpus:
        print("raypo: nvidia-smi finds no GPU on this machine, so there is nothing to accept.")
        return NO_GPU
    outcomes = []
    for part in asked or PARTS:
        print(f"{part} ...", flush=True)
        outcomes.append(run_part(part, [sys.executable, "-m", "tests.gpu.parts", part]))
        print(f"  {'passed' if outcomes[-1].passed else 'FAILED'}: {outcomes[-1].told}", flush=True)
    device = f"{node.gpus} x {node.gpu.name}" if node.gpu else f"{node.gpus} GPUs"
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(report(outcomes, device))
    print(f"The report is {REPORT.relative_to(REPOSITORY)}.")
    return 0 if all(each.passed for each in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
