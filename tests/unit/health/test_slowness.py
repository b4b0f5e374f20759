"""Estimates of what bounds a step: checked by applying the remedy to the seconds."""

from typing import Any

import pytest

from raypo.health.slowness import slowness

CONFIG: dict[str, Any] = {
    "num_steps": 200,
    "rollout": {"mode": "sync", "prompts_per_step": 64, "engine": {"count": 1}},
    "reward": {"function": "task.py:right", "processes": 0},
    "ppo": {"num_epochs": 1},
    "learner": {"num_workers": 1},
    "eval": {"every": 1},
    "checkpoint": {"every": 1},
}
PHASES = ("generate", "score", "log_probs", "update", "push_weights", "held_out", "checkpoint")


def rows(num_steps: int = 12, *, tail: float = 0.0, **seconds: float) -> list[dict[str, Any]]:
    """Steps of one second a phase but for those that are given; the first one warms up."""
    took = {f"time/{phase}_s": seconds.get(phase, 1.0) for phase in PHASES}
    warm = {name: 30.0 for name in took}
    each = {"rollout/tail_fraction": tail}
    return [{"step": n, **each, **(warm if n == 1 else took)} for n in range(1, num_steps + 1)]


def test_a_sampling_bound_run_is_told_what_its_tail_costs():
    why = slowness(rows(generate=8.0, tail=0.5), CONFIG)
    assert why is not None
    # 14 s a step. Ahead, the engines need 8 - 4 + 1 s of a step, the rest 5 s.
    assert why.ratio == pytest.approx(14 / 5)
    assert why.text == (
        "sampling bound, 57% of a step: 50% of it waits for the longest 3% of responses; "
        "rollout.mode: async, with engines on devices of their own, would hide it, est. 2.8x"
    )
    assert why.changes == {"rollout.mode": "async", "placement.mode": "dedicated"}


@pytest.mark.parametrize(
    ("slow", "bound", "changes", "left"),
    [
        ("score", "scoring", {"reward.processes": 4}, 6 + 14 / 4),
        ("update", "update", {"learner.num_workers": 2}, 5 + 15 / 2),
        ("push_weights", "push", {"rollout.prompts_per_step": 128}, 6 + 14 / 2),
    ],
)
def test_what_a_remedy_leaves_of_a_step(slow: str, bound: str, changes: dict, left: float):
    seconds: dict[str, Any] = {slow: 14.0}
    why = slowness(rows(**seconds), CONFIG)
    assert why is not None
    assert (why.bound, why.changes) == (bound, changes)
    assert why.ratio == pytest.approx(20 / left)


@pytest.mark.parametrize(
    ("slow", "key"), [("held_out", "eval.every"), ("checkpoint", "checkpoint.every")]
)
def test_a_rare_phase_gets_a_twentieth_of_the_time(slow: str, key: str):
    seconds: dict[str, Any] = {slow: 14.0}
    why = slowness(rows(**seconds), CONFIG)
    assert why is not None
    ((name, every),) = why.changes.items()
    assert name == key
    rest, took = 6.0, 14.0 / every
    assert took / (rest + took) == pytest.approx(0.05, abs=0.002)
    assert why.ratio == pytest.approx(20 / (rest + took))


def test_several_epochs_are_named_before_more_workers():
    config = CONFIG | {"ppo": {"num_epochs": 4}}
    why = slowness(rows(update=14.0), config)
    assert why is not None
    assert why.changes == {"ppo.num_epochs": 1}
    assert why.ratio == pytest.approx(20 / (6 + 14 / 4))


def test_a_learner_that_waits_for_engines_needs_more_of_them():
    ahead = [row | {"time/wait_for_rollouts_s": 6.0} for row in rows(generate=0.0, score=0.0)]
    why = slowness(ahead, CONFIG | {"rollout": {"mode": "async", "engine": {"count": 2}}})
    assert why is not None
    assert (why.bound, why.changes) == ("sampling", {"rollout.engine.count": 4})
    assert why.ratio == pytest.approx(11 / 5.5)


def test_a_round_cannot_be_sampled_ahead():
    rounds = CONFIG | {"recipe": "iterative_dpo"}
    why = slowness(rows(generate=14.0), rounds)
    assert why is not None
    assert (why.bound, why.changes) == ("sampling", {"rollout.engine.count": 2})
    assert why.ratio == pytest.approx(20 / 13)
    assert why.text.endswith("rollout.engine.count: 2 would halve it, est. 1.5x")


def test_the_evaluation_at_the_end_stays():
    why = slowness(rows(held_out=14.0), CONFIG | {"eval": {"every": 200}})
    assert why is not None
    assert (why.changes, why.ratio) == ({}, 1.0)
    assert "eval.every is as rare as it can be" in why.text


def test_reports_are_no_checkpoints():
    why = slowness([row | {"time/report_s": 14.0} for row in rows(update=2.0)], CONFIG)
    assert why is not None
    assert why.bound != "checkpoint"


def test_a_small_estimate_is_not_shown():
    ahead = [row | {"time/wait_for_rollouts_s": 0.1} for row in rows(generate=2.0)]
    why = slowness(ahead, CONFIG | {"rollout": {"mode": "async"}})
    assert why is not None
    assert 1.0 < why.ratio < 1.05
    assert why.text.endswith("twice as many engines would halve the wait")


def test_few_steps_and_short_ones_are_not_judged():
    assert slowness(rows(3), CONFIG) is None
    assert slowness([], CONFIG) is None
    assert slowness(rows(**dict.fromkeys(PHASES, 0.01)), CONFIG) is None
