"""`make gpu`: every part of the acceptance, each in a process of its own, and a report.

Run it: python -m tests.gpu.acceptance [PART ...]. Nothing needs to be installed: the checkout and
the packages in PYTHONPATH are enough. Each running part has a thread of this process, which waits
for it; a part begins as soon as the GPU memory that it declares is not declared by others, and
there are cores for it.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from raypo.cluster.hardware import this_machine
from tests.gpu.parts import ON_DEMAND, PARTS, REPOSITORY, SIDE_BY_SIDE

REPORT = REPOSITORY / "runs" / "gpu" / "report.md"
NO_GPU = 2
"""Exit status where there is nothing to run on."""
COLUMNS = ("planned_gb", "measured_gb", "planned_s", "measured_s")
CORES = 4
"""Cores for each part that runs beside others. On 16 cores seven parts at once starved each other:
four minutes passed before any of their runs had finished a step."""
LAST_LINES = 3
"""Lines of a failed part's errors that the report shows; its log has all of them."""


@dataclass(frozen=True)
class Outcome:
    """Result of a part."""

    part: str
    passed: bool
    seconds: float
    text: str
    """Its figures, and its last lines if it failed."""
    columns: Mapping[str, float] = field(default_factory=dict)
    """Figures that have columns of their own."""


def run_part(
    part: str, command: Sequence[str], limit_s: float, environ: Mapping[str, str] = os.environ
) -> Outcome:
    """Run a part in a process of its own, so that one that dies or hangs ends nothing else."""
    begin = time.perf_counter()
    process = psutil.Popen(
        command,
        cwd=REPOSITORY,
        env=dict(environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    hangs = False
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        hangs = True
        for each in [*process.children(recursive=True), process]:  # a run's Ray has the GPU, too
            with suppress(psutil.NoSuchProcess):
                each.kill()
        output, errors = process.communicate()
    seconds = time.perf_counter() - begin
    (REPORT.parent / f"{part}.log").write_text(output + errors)
    figures = _last_figures(output)
    passed = process.returncode == 0 and figures is not None and not hangs
    columns = {name: figures.pop(name) for name in COLUMNS if name in figures} if figures else {}
    texts = [f"{name}: {_short(value)}" for name, value in (figures or {}).items()]
    if hangs:
        texts.append(f"not done in {limit_s:g} s")
    elif not passed:
        lines = [line.strip() for line in (errors or output).splitlines() if line.strip()]
        texts.append(" / ".join(lines[-LAST_LINES:]) or f"exit status {process.returncode}")
    return Outcome(part, passed, seconds, ", ".join(texts), columns)


def _last_figures(output: str) -> dict[str, Any] | None:
    """Figures of the last line that has some; None without any."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            with suppress(json.JSONDecodeError):
                return json.loads(line)
    return None


def side_by_side(
    parts: Sequence[str],
    gpu_gb: float,
    run: Callable[[str], Outcome],
    on_done: Callable[[Outcome], object],
    *,
    most: int = sys.maxsize,
) -> list[Outcome]:
    """Run parts at the same time as long as they fit, in the order of their names.

    A part that does not fit waits, and those behind it that fit go first.

    Args:
        gpu_gb: Memory of the GPU; a part that wants more than all of it runs alone.
        run: Runs a part and waits for it; called in threads.
        on_done: Called with each outcome as it comes.
        most: Maximum number of parts at the same time.
    """
    waiting = list(parts)
    running: dict[Future[Outcome], float] = {}
    outcomes: dict[str, Outcome] = {}
    with ThreadPoolExecutor(len(parts)) as pool:
        while waiting or running:
            for part in list(waiting):
                need = min(PARTS[part].gpu_gb, gpu_gb)
                if len(running) < most and sum(running.values()) + need <= gpu_gb:
                    waiting.remove(part)
                    running[pool.submit(run, part)] = need
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                del running[each]
                outcome = each.result()
                outcomes[outcome.part] = outcome
                on_done(outcome)
    return [outcomes[part] for part in parts]


def report(outcomes: Sequence[Outcome], device: str, seconds: float) -> str:
    """Return the report as Markdown."""
    passed = sum(each.passed for each in outcomes)
    today = datetime.date.today().isoformat()
    lines = [
        "# raypo on a GPU",
        "",
        f"{device}, {today}: {passed} of {len(outcomes)} parts passed, in {seconds:.0f} s.",
        "",
        "| part | | seconds | memory planned, GB | measured, GB | step planned, s | measured, s "
        "| figures, and the last lines of a part that failed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        mark = "passed" if each.passed else "**failed**"
        numbers = [_short(each.columns[name]) if name in each.columns else "" for name in COLUMNS]
        text = each.text.replace("|", "/").replace("\n", " ")
        cells = [each.part, mark, f"{each.seconds:.0f}", *numbers, text]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _short(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def main(asked: Sequence[str]) -> int:
    """Exit status: 0 all passed, 1 some failed, 2 there is no GPU."""
    (node,) = this_machine()
    if not node.gpus:
        print("raypo: nvidia-smi finds no GPU on this machine, so there is nothing to accept.")
        return NO_GPU
    usual = [part for part in PARTS if part not in ON_DEMAND] + ["several"] * (node.gpus > 1)
    parts = list(asked) or usual
    environ = dict(os.environ) | ({SIDE_BY_SIDE: "1"} if len(parts) > 1 else {})
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    outcomes: list[Outcome] = []

    def run(part: str) -> Outcome:
        print(f"{part} ...", flush=True)
        command = [sys.executable, "-m", "tests.gpu.parts", part]
        return run_part(part, command, PARTS[part].limit_s, environ)

    device = f"{node.gpus} x {node.gpu.name}" if node.gpu else f"{node.gpus} GPUs"

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        mark = "passed" if outcome.passed else "FAILED"
        print(f"{outcome.part} {mark} in {outcome.seconds:.0f} s: {outcome.text}", flush=True)
        # Written after each part, so that a call that is cut off leaves a report.
        REPORT.write_text(report(outcomes, device, time.perf_counter() - begin))

    # Next to none where it is not known: then every part wants more, and runs alone.
    memory = (node.gpu_bytes or 1) / 1e9
    most = max(1, (os.cpu_count() or 1) // CORES)
    all_of_them = side_by_side(parts, memory, run, done, most=most)
    REPORT.write_text(report(all_of_them, device, time.perf_counter() - begin))
    print(f"The report is {REPORT.relative_to(REPOSITORY)}; beside it is what each part printed.")
    return 0 if all(each.passed for each in all_of_them) else 1


if __name__ == "__main__":
    unknown = set(sys.argv[1:]) - PARTS.keys()
    if unknown:
        sys.exit(f"raypo: no part {', '.join(unknown)}; there are {', '.join(PARTS)}.")
    sys.exit(main(sys.argv[1:]))
