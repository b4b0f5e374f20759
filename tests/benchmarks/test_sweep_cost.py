"""What sharing saves: trials of one sweep, with and without it, against runs one after the other.

Runs with a reward model and a reference, of so few steps that start-up is nearly all of them.
Ratios of device-seconds, wall time and peak memory are printed (`-s` shows them). Device-seconds
are what trials hold, a core each: a run of its own has the machine's other cores for its engine and
models besides, trials side by side have not. What a sweep spends before its first trial and after
its last is in the wall time alone. RAYPO_BENCHMARK_TRIALS=2 makes it short; the published figures
are of 8, and with early stopping of 16.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import yaml

from raypo.tuning.goal import KL, SCORE
from tests.integration.task import numbers, raypo, read_metrics, write_task
from tests.integration.test_vllm_frozen import tiny_reward_model

NUM_TRIALS = int(os.environ.get("RAYPO_BENCHMARK_TRIALS", "8"))
NUM_ALONE = 2
"""Runs of their own that are measured; all others are taken to cost as much."""
MAX_KL = 5
"""Nats a response that the winner of the sweep with early stopping may have."""
EVAL_EVERY = 4
"""Steps between two evaluations of the trials of the sweep with early stopping."""
NUM_CORES = 1
"""That a run of the task holds; as many trials run at a time as there are cores."""


@dataclass
class Cost:
    """Of all trials together."""

    device_s: float
    wall_s: float
    memory_gb: float

    def __truediv__(self, other: Cost) -> str:
        parts = (f"{name} {getattr(self, name) / getattr(other, name):.2f}" for name in vars(other))
        return ", ".join(parts)


@dataclass
class Usage:
    """Resources that a command and all processes that it starts have used."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Does not depend on what else the machine runs, as the wall time does."""
    memory_gb: float = 0.0
    """Peak; what processes share counts once."""


@contextmanager
def usage_of(pid: int) -> Iterator[Usage]:
    usage, done, begin = Usage(), threading.Event(), time.monotonic()
    cpu_s: dict[tuple[int, float], float] = {}

    def watch() -> None:
        while not done.wait(2.0):
            total = 0
            for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
                try:
                    total += process.memory_full_info().pss
                    times = process.cpu_times()
                    cpu_s[process.pid, process.create_time()] = times.user + times.system
                except psutil.Error:
                    continue
            usage.memory_gb = max(usage.memory_gb, total / 1e9)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield usage
    done.set()
    thread.join()
    usage.wall_s, usage.cpu_s = time.monotonic() - begin, sum(cpu_s.values())


def run(*arguments: str | Path) -> Usage:
    command = raypo(*arguments)
    with usage_of(command.pid) as usage:
        _, error = command.communicate()
    assert command.returncode == 0, error
    return usage


def sweep(folder: Path, name: str, more: str) -> Cost:
    import pyarrow.parquet as pq

    path = folder / f"{name}.yaml"
    path.write_text(
        f"name: {name}\nbase: {folder}/ppo.yaml\nstorage_path: {folder}/runs\n"
        f"space: {{seed: {{grid: {list(range(NUM_TRIALS))}}}}}\nsearcher: grid\n"
        f"metric: rollout/score_mean\n{more}\n"
    )
    usage = run("sweep", path)
    trials = pq.read_table(folder / "runs" / name / "trials.parquet").to_pylist()
    assert [trial["status"] for trial in trials] == ["finished"] * NUM_TRIALS
    device_s = sum(trial["device_s"] for trial in trials)
    return Cost(device_s, usage.wall_s, usage.memory_gb)


def separate_runs(folder: Path) -> Cost:
    each = [
        run("train", folder / "ppo.yaml", f"name=alone-{seed}", f"seed={seed}")
        for seed in range(NUM_ALONE)
    ]
    wall_s = sum(usage.wall_s for usage in each) / NUM_ALONE * NUM_TRIALS
    return Cost(NUM_CORES * wall_s, wall_s, max(usage.memory_gb for usage in each))


@pytest.mark.parametrize(
    ("lora", "ways"),
    [
        (None, {"shared": "", "private": "share: []"}),
        ("{rank: 4, push: adapter}", {"shared": ""}),
    ],
    ids=["whole", "adapters"],
)
def test_a_sweep_takes_at_most_half_as_long_as_separate_runs(
    tmp_path: Path, lora: str | None, ways: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    config = write_task(tmp_path)
    model = f"reward: {tiny_reward_model(tmp_path / 'reward', tmp_path / 'policy')}"
    if lora:
        model += f", lora: {lora}"
    config.write_text(config.read_text().replace("/policy}", f"/policy, {model}}}"))
    alone = separate_runs(tmp_path)
    sweeps = {name: sweep(tmp_path, name, more) for name, more in ways.items()}
    with capsys.disabled():
        print(f"\n{NUM_TRIALS} trials of 4 steps; as runs of their own: {alone}")
        for name, cost in sweeps.items():
            print(f"{name} / runs of their own: {cost / alone}")
    runs = tmp_path / "runs"
    for seed in range(NUM_TRIALS):
        found = [runs / name / "trials" / f"{name}-{seed:05d}" for name in sweeps]
        found += [runs / f"alone-{seed}"] if seed < NUM_ALONE else []
        first, *others = (numbers(read_metrics(folder)) for folder in found)
        assert all(other == first for other in others), found
    assert sweeps["shared"].wall_s <= 0.5 * alone.wall_s
    assert sweeps["shared"].device_s <= alone.device_s


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sixteen_trials_with_early_stopping_cost_a_quarter_of_separate_runs(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
):
    """ASHA stops trials early; the held-out verifier names the winner under a bound on the KL.

    Device-seconds are the machine's cores times the seconds of a command, from its start to its
    end: a run of its own has the machine for itself, as the whole sweep has. All runs of their own
    are taken to cost as much as that of the winner's values, with all steps.
    """
    import pyarrow.parquet as pq

    num_trials = int(os.environ.get("RAYPO_BENCHMARK_TRIALS", "16"))
    num_steps = 16 * num_trials
    write_task(tmp_path)
    base = {
        "num_steps": num_steps,
        "seed": seed,
        "eval.every": EVAL_EVERY,
        "checkpoint.every": num_steps,
    }
    path = tmp_path / "many.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "many",
                "base": f"{tmp_path}/ppo.yaml",
                "storage_path": f"{tmp_path}/runs",
                "overrides": base,
                "space": {
                    "learner.policy_lr": {"loguniform": [3e-4, 1e-2]},
                    "ppo.kl.coef": {"loguniform": [3e-3, 0.3]},
                },
                "searcher": "random",
                "num_samples": num_trials,
                "seed": seed,
                "scheduler": {"kind": "asha", "grace_steps": 4, "reduction_factor": 4},
                "constraint": f"kl/ref_response_mean <= {MAX_KL}",
            }
        )
    )
    together = run("sweep", path)
    trials = pq.read_table(tmp_path / "runs" / "many" / "trials.parquet").to_pylist()
    best, *others = trials
    alone, same = [], {}
    for trial, is_whole in ((best, True), (others[-1], False)):
        name = f"alone-{trial['name']}"
        values = base | json.loads(trial["point"])
        folder = tmp_path / "runs" / "many" / "trials" / trial["name"]
        # A stopped trial ends the step that it is in, which a run of as many steps would evaluate.
        # The best trial may have been stopped too, if those with higher scores broke the bound.
        tried = numbers(read_metrics(folder))
        tried = tried[: len(tried) // EVAL_EVERY * EVAL_EVERY]
        if not is_whole:
            values["num_steps"] = values["checkpoint.every"] = len(tried)
        overrides = [f"{key}={value}" for key, value in values.items()]
        alone.append(run("train", tmp_path / "ppo.yaml", f"name={name}", *overrides))
        found = numbers(read_metrics(tmp_path / "runs" / name))
        same[name, len(tried)] = found[: len(tried)] == tried
    steps = sorted(trial["step"] for trial in trials)
    with capsys.disabled():
        print(f"\nseed {seed}: {num_trials} trials of at most {num_steps} steps: {steps}")
        print(f"steps: {sum(steps)} of {num_trials * num_steps}")
        known = json.loads(best["metrics"])
        before, score, kl = (known[each] for each in ("eval/initial_score_mean", SCORE, KL))
        print(f"the winner: {best['point']}, {best['status']}, score {before:.3f} -> {score:.3f},")
        print(f"{kl:.2f} nats; infeasible: {sum(not trial['feasible'] for trial in trials)}")
        print(f"the sweep: {together}\na run alone: {alone[0]}\n{len(tried)} steps: {alone[1]}")
        wall, cpu = (
            getattr(together, each) / getattr(alone[0], each) / num_trials
            for each in ("wall_s", "cpu_s")
        )
        print(f"the sweep / {num_trials} runs: device-seconds {wall:.2f}, of computing {cpu:.2f}")
    assert all(same.values()), same
    assert best["feasible"]
    assert num_trials < 16 or wall <= 0.3
