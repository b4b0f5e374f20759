"""Rules on a run's processes: memory, slow ones, the KV cache, the reward function."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from raypo.health.rule import ROUNDS, Alarm, History, Rule, rule, value_at

LEAK_STEPS, LEAK_RECORDS, MIN_LEAK = 20, 15, 0.1
MAX_RATIO, STRAGGLER_STEPS = 1.5, 5
MAX_PREEMPTED = 0.1
MAX_SCORING, MIN_SCORING_S, SCORING_STEPS = 0.3, 1.0, 5


@rule(LEAK_STEPS + 11)
def memory_leak(history: History, config: Mapping[str, Any]) -> Alarm:
    """After the first 10 steps, the peak memory of a role (`perf/memory_<role>_gb` or its GPU
    memory) is a new record in at least 15 of 20 steps, and grows by 10 % over them and by a larger
    share than the responses (`rollout/response_tokens_mean`). Of 20 equally distributed peaks after
    10 others, 1.1 are records."""
    lengths = history.newest("rollout/response_tokens_mean", LEAK_STEPS + 1)
    longer = sum(lengths[-5:]) / max(sum(lengths[:5]), 1e-9) - 1.0 if lengths else 0.0
    for name in sorted(history.last):
        match = re.fullmatch(r"perf/(gpu_)?memory_(.+)_gb", name)
        peaks = history.newest(name, LEAK_STEPS + 11)[10:] if match else []
        if not match or not peaks:
            continue
        records = sum(after > before for before, after in pairwise(peaks))
        grown = peaks[-1] - peaks[0]
        if records >= LEAK_RECORDS and grown > max(MIN_LEAK, longer) * peaks[0]:
            kind = "GPU memory" if match[1] else "memory"
            return (
                f"the {kind} of {match[2].replace('_', ' ')} grows by "
                f"{1000 * grown / LEAK_STEPS:.0f} MB per step, to {peaks[-1]:.2f} GB: something "
                "leaks.",
                "If your functions (reward.function, environments, callbacks) keep what they see, "
                "let them forget it, or run them in processes (reward.processes). A resume frees "
                "the memory.",
            )
    return None


@rule(STRAGGLER_STEPS)
def straggler(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 5 steps in a row, the slowest learner worker takes 1.5 times as long per token as the
    median (`perf/slowest_worker_ratio`) and is the same one, or so does an engine per step
    (`perf/slowest_engine_ratio`)."""
    for kind in ("worker", "engine"):
        ratios = history.newest(f"perf/slowest_{kind}_ratio", STRAGGLER_STEPS)
        which = history.newest(f"perf/slowest_{kind}", STRAGGLER_STEPS)
        if ratios and min(ratios) > MAX_RATIO and len(set(which)) == 1:
            role = "learner worker" if kind == "worker" else "engine"
            return (
                f"{role} {which[-1]:.0f} is {ratios[-1]:.1f} times as slow as the median, and all "
                "others wait for it.",
                "Look for another process on its device or cores (raypo doctor --cluster), for a "
                "throttled GPU, and replace its node.",
            )
    return None


@rule(SCORING_STEPS)
def slow_reward(history: History, config: Mapping[str, Any]) -> Alarm:
    """Over 5 steps, scoring takes more than 30 % of the time, and more than 1 s a step."""
    took, steps = (history.newest(name, SCORING_STEPS) for name in ("time/score_s", "time/step_s"))
    if not took or not steps or sum(took) <= MAX_SCORING * sum(steps):
        return None
    if sum(took) / SCORING_STEPS < MIN_SCORING_S:
        return None
    remedies = []
    others = ("reward.url", "reward.judge", "model.reward")
    # A function that is given in Python is not in the config.
    if value_at(config, "reward.function") or not any(value_at(config, key) for key in others):
        is_pooled = bool(value_at(config, "reward.processes"))
        remedies.append(f"{'raise' if is_pooled else 'set'} reward.processes")
        remedies.append("batch the calls of reward.function")
    else:
        remedies.append("give reward models, judges or reward servers more devices")
    if value_at(config, "recipe") not in ROUNDS and value_at(config, "rollout.mode") != "async":
        remedies.append("score while the learner updates (rollout.mode: async)")
    remedy = ", or ".join(remedies)
    return (
        f"scoring takes {sum(took) / sum(steps):.0%} of a step ({took[-1]:.1f} s), while engines "
        "and learner wait.",
        f"{remedy[0].upper()}{remedy[1:]}.",
    )


@rule()
def kv_thrashing(history: History, config: Mapping[str, Any]) -> Alarm:
    """In 3 steps in a row, the engines evict more than one running request for every 10 samples
    (`perf/engine_preemptions`), and compute its tokens again."""
    evicted = history.newest("perf/engine_preemptions")
    sampled = history.newest("rollout/samples_sampled")
    if not evicted or not sampled:
        return None
    shares = [count / max(samples, 1.0) for count, samples in zip(evicted, sampled, strict=True)]
    if min(shares) <= MAX_PREEMPTED:
        return None
    return (
        f"the engines evicted {evicted[-1]:.0f} requests for {sampled[-1]:.0f} samples: the KV "
        "cache is too small for as many at a time, and their tokens are computed again.",
        "Raise rollout.engine.gpu_memory_fraction or rollout.engine.kv_cache_gb, or lower "
        "max_num_seqs in rollout.engine.extra.",
    )


RULES: tuple[Rule, ...] = (memory_leak, straggler, slow_reward, kv_thrashing)
