"""Hundreds of steps with seeded kills: memory, file handles and /dev/shm of all processes stay.

`SOAK_STEPS` sets the number of steps, and `SOAK_SECONDS` the time after which the run stops.
"""

from __future__ import annotations

import os
from collections import defaultdict
from math import isfinite
from pathlib import Path
from statistics import median

import pytest

from raypo import PPOConfig, PPOTrainer
from tests.integration.task import read_metrics
from tests.integration.test_vllm_frozen import tiny_reward_model
from tests.slow import soaked_run
from tests.slow.test_ahead_matrix import ray_of_six

__all__ = ["ray_of_six"]

NUM_STEPS = int(os.environ.get("SOAK_STEPS", "300"))
SECONDS = float(os.environ.get("SOAK_SECONDS", "inf"))
WARM_UP = 20
"""Steps of a process whose memory still grows: caches, first allocations."""
MAX_GROWTH = 0.05
"""Share by which the memory of a process may grow from the first to the last half of its life."""
SLACK = {"bytes": 20e6, "handles": 5, "threads": 3}


@pytest.fixture(scope="module", autouse=True)
def soak_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    # Before Ray starts, whose workers inherit it.
    os.environ["SOAK_FOLDER"] = str(tmp_path_factory.mktemp("soak"))


def test_a_long_run_with_kills_does_not_grow(
    soak_folder: None, ray_of_six: None, task: Path, tmp_path: Path
):
    keys = {
        "name": soaked_run.NAME,
        "num_steps": NUM_STEPS,
        "model.reward": str(tiny_reward_model(tmp_path / "model", task.parent / "policy")),
        "placement.mode": "dedicated",
        "placement.deployment.max_restarts": 100,
        "learner.num_workers": 2,
        "eval.every": 10,
        "checkpoint.every": 5,
        "checkpoint.keep": 2,
        "max_failures": 100,
        "stop.after_s": SECONDS if isfinite(SECONDS) else None,
        "callbacks": ["tests.slow.soaked_run:measure", "tests.slow.soaked_run:disturb"],
    }
    ended = PPOTrainer(PPOConfig.load(task, keys)).fit().return_value
    assert ended is not None
    assert ended["status"] == ("finished" if ended["step"] == NUM_STEPS else "interrupted")
    steps = [row["step"] for row in read_metrics(task.parent / "runs" / soaked_run.NAME)]
    assert steps == list(range(1, ended["step"] + 1)), "each step once"

    measured = soaked_run.read("measured.jsonl")
    lives: dict[tuple[int, str], list[dict[str, float]]] = defaultdict(list)
    for line in measured:
        for row in line["processes"]:
            lives[row["pid"], row["title"].split()[0]].append(row)
    grown = []
    for (pid, title), rows in lives.items():
        rows = rows[WARM_UP // soaked_run.EVERY :]
        if len(rows) < 4:
            continue  # killed too early to tell
        half = len(rows) // 2
        for name, slack in SLACK.items():
            first, last = (median(row[name] for row in part) for part in (rows[:half], rows[half:]))
            if last - first > max(slack, MAX_GROWTH * first):
                grown.append(f"{title} ({pid}): {name} {first:.0f} -> {last:.0f}")
    totals = [(line["step"], sum(p["bytes"] for p in line["processes"])) for line in measured]
    counts = [len(line["processes"]) for line in measured]
    print(f"\nshared: {[line['shared'] >> 20 for line in measured]} MiB")
    print(f"memory: {[total >> 20 for _, total in totals]} MiB; processes: {counts}")
    assert not grown, "\n".join(grown)
    quarter = len(measured) // 4
    for values in ([line["shared"] for line in measured], counts):
        begin, end = median(values[quarter : 2 * quarter]), median(values[-quarter:])
        assert end <= 1.1 * begin + 1
