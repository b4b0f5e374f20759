"""Plants a bottleneck in a small run, does what the sentence on the run's speed says, and compares.

    python -m tests.benchmarks.bottlenecks [POLICY]

POLICY is a folder of `tests.small_run.half_taught_policy`, which is otherwise made first. The runs
have no Ray and no engines of their own, so the remedies that need them are not tried here: those of
sampling (rollout.mode), of scoring (reward.processes) and of more workers.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from raypo.health.slowness import Slowness, seconds_by_phase, slowness
from raypo.storage.run_files import RunFiles
from raypo.types import Rollout
from tests.small_run import half_taught_policy, right, run_small

NUM_STEPS = 13


def slow_judge(rollouts: list[Rollout]) -> list[float]:
    time.sleep(2.0)
    return right(rollouts)


PLANTED: dict[str, dict[str, Any]] = {
    "evaluation": {"judge": slow_judge, "eval": {"every": 1}},
}
"""Options of a run, by what bounds it."""


def seconds_per_step(files: RunFiles) -> float:
    """Return the mean seconds per step, without the first one."""
    rows = files.metrics()[1:]
    return sum(seconds_by_phase(rows).values()) / len(rows)


def compare(folder: Path, policy: Path, bound: str) -> tuple[Slowness, float]:
    """Return the sentence on a planted bottleneck, and the ratio that its remedy reaches."""
    options: dict[str, Any] = PLANTED[bound]
    before = run_small(folder, policy, f"{bound}-before", num_steps=NUM_STEPS, **options)
    why = slowness(before.metrics(), before.config() or {})
    assert why is not None
    assert why.bound == bound, why.text
    changed: dict[str, Any] = {
        section: dict(keys) for section, keys in options.items() if isinstance(keys, dict)
    }
    for key, value in why.changes.items():
        section, name = key.split(".")
        changed.setdefault(section, {})[name] = value
    options = options | changed
    after = run_small(folder, policy, f"{bound}-after", num_steps=NUM_STEPS, **options)
    return why, seconds_per_step(before) / seconds_per_step(after)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        policy = Path(sys.argv[1]) if sys.argv[1:] else half_taught_policy(Path(temporary) / "p")
        for bound in PLANTED:
            why, reached = compare(Path(temporary), policy, bound)
            print(f"{why.text}; predicted {why.ratio:.2f}x, reached {reached:.2f}x", flush=True)
