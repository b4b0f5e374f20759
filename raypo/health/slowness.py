"""Why a run is slow: what bounds its steps, and the key that would change it most.

Estimates assume that nothing else changes: phases that run side by side do not slow each other
down, and phases that are split over more processes are split evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raypo.health.rule import ROUNDS, value_at
from raypo.metrics.catalogue import Row

MIN_STEPS = 3
"""Fewest steps to judge, without the first one, which warms up."""
MAX_STEPS = 50
"""Most steps, the newest ones, whose seconds are summed."""
MIN_STEP_S = 0.1
"""Seconds. A shorter step is not slow."""
TAIL_SHARE = 0.03
"""Share of the responses, the longest ones, that count as the tail (`rollout/tail_fraction`)."""
RARE_SHARE = 0.05
"""Share of the time that evaluations and checkpoints should take at most."""
REWARD_PROCESSES = 4
MIN_RATIO = 1.05
"""Smallest ratio of step times that is shown as an estimate."""

_BOUNDS = {
    "sampling": ("time/generate_s", "time/wait_for_rollouts_s"),
    "scoring": ("time/score_s",),
    "update": ("time/log_probs_s", "time/update_s"),
    "push": ("time/push_weights_s",),
    "evaluation": ("time/held_out_s",),
    "checkpoint": ("time/checkpoint_s",),
    "callback": ("time/callbacks_s",),
}
"""Phases that a remedy changes together, by what they bound."""


@dataclass(frozen=True)
class Slowness:
    """Estimate of what bounds a run's steps, and of what its remedy would gain."""

    bound: str
    share: float
    """Share of a step that it takes."""
    ratio: float
    """Estimated step time now, divided by that after the remedy; 1 if there is no estimate."""
    changes: dict[str, Any]
    """Keys and values of the remedy. Empty if no key helps."""
    text: str
    """One sentence with all of it."""


@dataclass(frozen=True)
class _Step:
    """A mean step."""

    seconds: Mapping[str, float]
    """Seconds by phase."""
    tail_s: float
    """Seconds in which only the longest responses are sampled."""

    @property
    def total_s(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    def of(self, bound: str) -> float:
        """Return the seconds of the phases that have a bound."""
        return sum(self.seconds.get(name, 0.0) for name in _BOUNDS[bound])


def phase_seconds(row: Row) -> dict[str, float]:
    """Return the seconds of a step by phase: all `time/` metrics except the step's total."""
    return {
        name: value
        for name, value in row.items()
        if name.startswith("time/") and name != "time/step_s" and math.isfinite(value)
    }


def seconds_by_phase(rows: Iterable[Row]) -> dict[str, float]:
    """Return the seconds of each phase, summed over all steps, in the order of the phases."""
    seconds: dict[str, float] = {}
    for row in rows:
        for name, value in phase_seconds(row).items():
            seconds[name] = seconds.get(name, 0.0) + value
    return seconds


def slowness(rows: Sequence[Row], config: Mapping[str, Any]) -> Slowness | None:
    """Return what bounds the newest steps of a run. None if there are too few steps, or short ones.

    Args:
        rows: The run's metrics by step.
        config: The resolved config.
    """
    rows = rows[1:][-MAX_STEPS:]
    seconds = {name: value / len(rows) for name, value in seconds_by_phase(rows).items() if rows}
    tail_s = _mean(rows, "rollout/tail_fraction") * seconds.get("time/generate_s", 0.0)
    step = _Step(seconds, tail_s)
    if len(rows) < MIN_STEPS or step.total_s < MIN_STEP_S:
        return None
    bound = max(_BOUNDS, key=step.of)
    share = step.of(bound) / step.total_s
    changes, ratio, how = _remedy(bound, step, config)
    why = ""
    if bound == "sampling" and tail_s > 0.1 * step.of(bound):
        why = (
            f": {tail_s / step.of(bound):.0%} of it waits for the longest {TAIL_SHARE:.0%} of "
            "responses"
        )
    estimate = f", est. {ratio:.1f}x" if ratio >= MIN_RATIO else ""
    sentence = f"{bound} bound, {share:.0%} of a step{why}; {how}{estimate}"
    return Slowness(bound, share, ratio, changes, sentence)


def _remedy(
    bound: str, step: _Step, config: Mapping[str, Any]
) -> tuple[dict[str, Any], float, str]:
    """Return the keys to change, the estimated ratio of step times, and both in words."""
    total, took = step.total_s, step.of(bound)
    if bound == "sampling":
        return _sampling(step, config)
    if bound == "scoring":
        if value_at(config, "reward.function") is None:
            return {}, 1.0, "give reward models, judges or reward servers more devices"
        now = value_at(config, "reward.processes") or 0
        later = max(REWARD_PROCESSES, 2 * now)
        left = total - took * (1.0 - max(now, 1) / later)
        how = f"reward.processes: {later} would split it"
        return {"reward.processes": later}, total / left, how
    if bound == "update":
        epochs = value_at(config, "ppo.num_epochs") or 1
        if epochs > 1:
            left = total - step.seconds.get("time/update_s", 0.0) * (1.0 - 1.0 / epochs)
            how = "ppo.num_epochs: 1 would read each sample once"
            return {"ppo.num_epochs": 1}, total / left, how
        workers = 2 * (value_at(config, "learner.num_workers") or 1)
        left = total - took / 2.0
        how = f"learner.num_workers: {workers}, on as many devices, would halve it"
        return {"learner.num_workers": workers}, total / left, how
    if bound == "push":
        prompts = value_at(config, "rollout.prompts_per_step")
        if not prompts:  # a recipe on examples, which pushes to evaluate
            return {}, 1.0, "a larger eval.every would push less often"
        later = 2 * prompts
        ratio = 2.0 * total / (2.0 * total - took)  # of the samples per second
        how = f"rollout.prompts_per_step: {later} would push half as often"
        return {"rollout.prompts_per_step": later}, ratio, how
    if bound == "callback":
        return {}, total / (total - took), "make the callbacks faster"
    key = "eval.every" if bound == "evaluation" else "checkpoint.every"
    every = value_at(config, key) or 1
    num_steps = value_at(config, "num_steps")
    if num_steps and every >= num_steps:
        return {}, 1.0, f"{key} is as rare as it can be, because the last step has one in any case"
    # Its share of the time becomes RARE_SHARE: took * every / later = RARE_SHARE * (rest + it).
    later = math.ceil(every * took * (1.0 - RARE_SHARE) / (RARE_SHARE * max(total - took, 1e-9)))
    later = min(max(later, every + 1), num_steps or later)
    left = total - took * (1.0 - every / later)
    return {key: later}, total / left, f"{key}: {later} would do it less often"


def _sampling(step: _Step, config: Mapping[str, Any]) -> tuple[dict[str, Any], float, str]:
    total = step.total_s
    mode = value_at(config, "rollout.mode") or "sync"
    if mode == "sync" and value_at(config, "recipe") not in ROUNDS:
        sampled = step.of("sampling") + step.of("scoring")
        left = max(sampled - step.tail_s, total - sampled)
        changes = {"rollout.mode": "async", "placement.mode": "dedicated"}
        is_apart = value_at(config, "placement.mode") == "dedicated"
        where = "" if is_apart else ", with engines on devices of their own,"
        return changes, total / left, f"rollout.mode: async{where} would hide it"
    engines = value_at(config, "rollout.engine.count")
    later = 2 * engines if isinstance(engines, int) else None
    waited = step.seconds.get("time/wait_for_rollouts_s", 0.0)
    # While the learner waits, the engines set the pace: a step takes as long as they need.
    left = max(total / 2.0, total - waited)
    if mode == "sync":
        left = total - step.of("sampling") / 2.0
    changes = {"rollout.engine.count": later} if later else {}
    how = f"rollout.engine.count: {later}" if later else "twice as many engines"
    what = "it" if mode == "sync" else "the wait"
    return changes, total / left, f"{how} would halve {what}"


def _mean(rows: Sequence[Row], name: str) -> float:
    values = [row[name] for row in rows if math.isfinite(row.get(name, math.nan))]
    return sum(values) / len(values) if values else 0.0
