"""What sharing saves: trials of one sweep, with and without it, against runs one after the other.

Ratios of device-seconds, wall time and peak memory are printed (`-s` shows them).
RAYPO_BENCHMARK_TRIALS=2 makes it short; the published figures are of 8.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.integration.task import numbers, raypo, read_metrics, write_task

NUM_TRIALS = int(os.environ.get("RAYPO_BENCHMARK_TRIALS", "8"))
NUM_CORES = 1
"""That a trial of the task holds."""


@dataclass
class Cost:
    """Of all trials together."""

    device_s: float
    wall_s: float
    memory_gb: float

    def __truediv__(self, other: Cost) -> str:
        parts = (f"{name} {getattr(self, name) / getattr(other, name):.2f}" for name in vars(other))
        return ", ".join(parts)


@contextmanager
def memory_of(pid: int) -> Iterator[list[float]]:
    """The peak of a process and its descendants, in GB; what they share counts once."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(1.0):
            total = 0
            for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                except psutil.Error:
                    continue
            peak[0] = max(peak[0], total / 1e9)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield peak
    done.set()
    thread.join()


def run(*arguments: str | Path) -> tuple[float, float]:
    """Seconds and peak memory of a command."""
    begin = time.monotonic()
    command = raypo(*arguments)
    with memory_of(command.pid) as peak:
        _, error = command.communicate()
    assert command.returncode == 0, error
    return time.monotonic() - begin, peak[0]


def sweep(folder: Path, name: str, share: str) -> Cost:
    import pyarrow.parquet as pq

    path = folder / f"{name}.yaml"
    path.write_text(
        f"name: {name}\nbase: {folder}/ppo.yaml\nstorage_path: {folder}/runs\n"
        f"space: {{seed: {{grid: {list(range(NUM_TRIALS))}}}}}\nsearcher: grid\n"
        f"metric: rollout/score_mean\nshare: {share}\nmax_concurrent: 1\n"
    )
    wall_s, memory_gb = run("sweep", path)
    trials = pq.read_table(folder / "runs" / name / "trials.parquet").to_pylist()
    assert [trial["status"] for trial in trials] == ["finished"] * NUM_TRIALS
    return Cost(sum(trial["device_s"] for trial in trials), wall_s, memory_gb)


def separate_runs(folder: Path) -> Cost:
    each = [
        run("train", folder / "ppo.yaml", f"name=alone-{seed}", f"seed={seed}")
        for seed in range(NUM_TRIALS)
    ]
    wall_s = sum(seconds for seconds, _ in each)
    return Cost(NUM_CORES * wall_s, wall_s, max(memory for _, memory in each))


@pytest.mark.parametrize("lora", [None, "{rank: 4, push: adapter}"], ids=["whole", "adapters"])
def test_a_sweep_costs_at_most_half_of_separate_runs(
    tmp_path: Path, lora: str | None, capsys: pytest.CaptureFixture[str]
):
    config = write_task(tmp_path)
    if lora:
        text = config.read_text().replace("/policy}", f"/policy, lora: {lora}}}")
        config.write_text(text)
    alone = separate_runs(tmp_path)
    shared = sweep(tmp_path, "shared", "auto")
    private = sweep(tmp_path, "private", "[]")
    with capsys.disabled():
        print(f"\n{NUM_TRIALS} trials of 4 steps")
        print(f"separate runs: {alone}")
        print(f"shared  / separate runs: {shared / alone}")
        print(f"private / separate runs: {private / alone}")
        print(f"shared  / private:       {shared / private}")
    runs = tmp_path / "runs"
    for seed in range(NUM_TRIALS):
        expected = numbers(read_metrics(runs / f"alone-{seed}"))
        for name in ("shared", "private"):
            trial = runs / name / "trials" / f"{name}-{seed:05d}"
            assert numbers(read_metrics(trial)) == expected, trial
    assert shared.device_s <= 0.5 * alone.device_s
