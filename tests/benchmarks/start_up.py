"""The timeline of a start on this machine, by process, beside the start of vLLM alone.

    python -m tests.benchmarks.start_up [--repeats 3] [--only raypo]

A run of GRPO with a reference model, as in `bench.py`, until its first step begins. Processes are
watched every 0.05 s: when each kind of them appeared, and how many seconds of a core it took. On a
busy machine those say more than the seconds that pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.benchmarks.bench import ROOT, Bench

EVERY_S = 0.05
ROWS = (
    ("vLLM alone", r"bench_pieces"),
    ("driver", r"raypo\.cli"),
    ("learner worker", r"ray::RayTrainWorker"),
    ("engine", r"ray::Engine"),
    ("reference model", r"ray::ReferenceModel"),
    ("Ray Train's controller", r"ray::TrainController"),
    ("run monitor", r"ray::Monitor"),
    ("other workers of Ray", r"ray::"),
    ("Ray's own processes", r""),
)
"""Rows of the table, and the titles of their processes; the first that fits counts."""


@dataclass
class Seen:
    """A process: when it appeared, its last title, and its seconds of a core over time."""

    begin_s: float
    title: str = ""
    cpu_s: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Start:
    """A start, in seconds since the command was given."""

    end_s: float = 0.0
    lines: list[tuple[float, str]] = field(default_factory=list)
    processes: dict[int, Seen] = field(default_factory=dict)

    def rows(self) -> dict[str, tuple[float, float]]:
        """First appearance and seconds of a core, by row."""
        found: dict[str, tuple[float, float]] = {}
        for each in self.processes.values():
            row = next(name for name, title in ROWS if re.search(title, each.title))
            begin, cpu = found.get(row, (each.begin_s, 0.0))
            taken = max((cpu_s for at, cpu_s in each.cpu_s if at <= self.end_s), default=0.0)
            found[row] = min(begin, each.begin_s), cpu + taken
        return found


def watched(command: Sequence[str]) -> Start:
    """Run a command, and watch its processes until it ends."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    start, began, done = Start(), time.time(), threading.Event()
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def look() -> None:
        root = psutil.Process(child.pid)
        while not done.wait(EVERY_S):
            with contextlib.suppress(psutil.Error):
                for each in [root, *root.children(recursive=True)]:
                    with contextlib.suppress(psutil.Error), each.oneshot():
                        seen = start.processes.setdefault(
                            each.pid, Seen(each.create_time() - began)
                        )
                        seen.title = " ".join(each.cmdline()) or seen.title
                        times = each.cpu_times()
                        seen.cpu_s.append((time.time() - began, times.user + times.system))

    thread = threading.Thread(target=look)
    thread.start()
    assert child.stdout is not None
    for line in child.stdout:
        start.lines.append((time.time() - began, line.rstrip()))
    done.set()
    thread.join()
    start.end_s = time.time() - began
    if child.wait():
        raise RuntimeError("\n".join(line for _, line in start.lines))
    return start


def start_of_raypo(bench: Bench) -> Start:
    """Start the run of `bench.py`, until its first step begins."""
    work = bench.work("bf16", "short", steps=0)
    file = bench.run_file(work)
    began = time.time()
    start = watched([sys.executable, "-m", "raypo.cli", "train", str(file), "--fresh"])
    timeline = bench.folder / "raypo_runs/bench/timeline/worker_0.jsonl"
    spans = json.loads(timeline.read_text().splitlines()[0])["spans"]
    start.end_s = min(begin for track, _, begin, _ in spans if track == "worker 0") - began
    return start


def start_of_vllm(bench: Bench) -> Start:
    """Start vLLM alone: its imports and its engine."""
    work = bench.work("bf16", "short", repeats=0)
    return watched(
        [sys.executable, "-m", "tests.benchmarks.bench_pieces", "vllm", json.dumps(work)]
    )


def show(tool: str, starts: Sequence[Start]) -> tuple[float, float]:
    """Print the start of median length; return its seconds, and those of a core."""
    middle = sorted(starts, key=lambda start: start.end_s)[len(starts) // 2]
    rows = middle.rows()
    cores = sum(cpu for _, cpu in rows.values())
    print(f"\n{tool}: {', '.join(f'{each.end_s:.1f}' for each in starts)} s")
    for at, line in middle.lines:
        if at <= middle.end_s:
            print(f"{at:6.1f} {line[:100]}")
    print("\n| process | appears, s | seconds of a core |\n|---|---|---|")
    for row, (begin, cpu) in sorted(rows.items(), key=lambda item: item[1][0]):
        print(f"| {row} | {begin:.1f} | {cpu:.1f} |")
    print(f"| all | {middle.end_s:.1f} in all | {cores:.1f} |")
    return middle.end_s, cores


def main() -> None:
    """Start vLLM and raypo in turn, because the machine drifts, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=TOOLS, default=[*TOOLS])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/start-up")
    options = parser.parse_args()
    bench = Bench(options.runs.resolve(), repeats=0)
    starts: dict[str, list[Start]] = {tool: [] for tool in options.only}
    for _ in range(options.repeats):
        for tool, each in starts.items():
            each.append(TOOLS[tool](bench))
    usual = {tool: show(tool, each) for tool, each in starts.items()}
    if len(usual) == len(TOOLS):
        ratios = [mine / alone for mine, alone in zip(usual["raypo"], usual["vllm"], strict=True)]
        print("\nraypo / vLLM: {:.2f} in seconds, {:.2f} in seconds of a core".format(*ratios))


TOOLS = {"vllm": start_of_vllm, "raypo": start_of_raypo}

if __name__ == "__main__":
    main()
