"""A step as the loop wires it does not depend on how it is cut, whatever the combination."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from raypo.collectives import Workers
from raypo.config import PPOSection
from raypo.rollout.sharding import to_experience
from tests.unit.learner.plain import (
    Outcome,
    PlainModel,
    group,
    on_workers,
    one_step,
    plain_learner,
    plain_models,
)

ESTIMATORS = (
    *("gae", "reinforce", "reinforce_baseline", "rloo", "grpo", "dr_grpo"),
    *("opo", "maxrl", "pass_at_k", "gdpo", "gigpo"),
)
LOSSES = (
    *("ppo", "gspo", "cispo", "sapo", "gmpo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl"),
    "vespo",
)
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
CORRECTIONS = ("none", "tis", "sequence_tis", "geometric_tis", "icepop", "mis")
MASKS = {"mis": {"low": 0.8, "high": 1.2}}  # the tiny responses drift far
COVARIANCE = {
    "clip_cov": {"fraction": 0.3, "low": -0.5, "high": 9.0},
    "kl_cov": {"fraction": 0.3},
}
KL_TERMS = (("k1", "reward"), ("k2", "loss"), ("k3", "loss"), ("k3_st", "loss"), ("k1", "reward"))


def combinations() -> Iterator[PPOSection]:
    """All pairs of the six estimators and seven losses that came first, and a fifth of the others;
    the other choices take turns, so each meets each.
    """
    pairs = itertools.product(enumerate(ESTIMATORS), enumerate(LOSSES))
    kept = (
        ((row, advantage), (column, loss))
        for (row, advantage), (column, loss) in pairs
        if (row < 6 and column < 7) or (row + column) % 5 == 0
    )
    for number, ((row, advantage), (column, loss)) in enumerate(kept):
        correction = CORRECTIONS[(row + column + row * 4) % 6]
        estimator, placement = KL_TERMS[number % 5]
        if advantage in ("maxrl", "gdpo", "gigpo") and placement == "reward":  # which refuse it
            estimator, placement = "k2", "loss"
        yield PPOSection.model_validate(
            {
                "advantage": advantage,
                "policy_loss": loss,
                "aggregation": AGGREGATIONS[(row + column) % 3],
                "correction": {
                    "kind": correction,
                    "token_veto": 0.4 if number % 2 else None,
                    "off_policy_mask": 0.05 if number % 3 == 1 else None,
                    **MASKS.get(correction, {}),
                },
                "minibatch_size": 5,  # 12 responses: minibatches of 4
                "entropy_coef": 0.1,
                "top_entropy_fraction": 0.4 if number % 5 == 2 else 1.0,
                "clip_high": 0.2
                if loss in ("sapo", "kl_cov", "vespo")
                else 0.05,  # which have none
                "dual_clip": 1.1 if loss in ("ppo", "gspo", "clip_cov") else None,
                "cispo_low": 0.05 if loss == "cispo" else None,
                "covariance": COVARIANCE.get(loss, {}),
                "nll_coef": 0.2 * (number % 3),
                "advantage_clip": 1.0 if number % 5 == 0 else None,
                "mask_truncated": advantage != "gae" and number % 4 == 1,
                "bootstrap_truncated": advantage == "gae",
                "gamma": 0.9,
                "pass_k": 2 if advantage == "pass_at_k" else 4,
                "kl": {
                    "coef": 0.3,
                    "estimator": estimator,
                    "placement": placement,
                    "importance_weights": placement == "loss" and number % 2 == 0,
                },
                "shaping": {"normalize": number % 2 == 0, "overlong_buffer_tokens": "auto"}
                | ({"clip_low": 0.0} if advantage == "maxrl" else {})
                if advantage != "gdpo"
                else {},
                "part_weights": {"right": 1.0, "model": 0.7} if advantage == "gdpo" else None,
                "filter": {"enabled": number % 4 == 0},
            }
        )


CASES = [
    pytest.param(ppo, id=f"{ppo.advantage}-{ppo.policy_loss}-{ppo.aggregation}")
    for ppo in combinations()
]


def assert_same(outcome: Outcome, whole: Outcome) -> None:
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=5e-7)  # log-probs are float32
    for model in ("policy", "critic"):
        mine, theirs = getattr(outcome, model), getattr(whole, model)
        assert len(mine) == len(theirs)
        for gradient, expected in zip(mine, theirs, strict=True):
            close(gradient, expected)
    assert outcome.figures.keys() == whole.figures.keys()
    for name, value in whole.figures.items():
        assert outcome.figures[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    assert outcome.state.kl == whole.state.kl
    assert outcome.state.scores.mean == pytest.approx(whole.state.scores.mean)


@pytest.mark.parametrize("ppo", CASES)
def test_rows_microbatches_padding_and_workers_change_nothing(ppo: PPOSection):
    with plain_models():
        whole = one_step(ppo)
        assert len(whole.policy) == 3
        assert all(gradient.norm() > 0 for gradient in whole.policy[:2])

        assert_same(one_step(ppo, tokens=1, shuffled=True), whole)
        count = 2 + len(ppo.aggregation) % 2
        for outcome in on_workers(count, lambda workers: one_step(ppo, workers, tokens=40)):
            assert_same(outcome, whole)


WITH_CRITIC = [ppo for ppo in combinations() if ppo.needs_critic]
WITH_CRITIC += [
    PPOSection(minibatch_size=12),  # the update itself finds the old log-probs
    PPOSection(minibatch_size=5, critic_warmup_steps=2),
    PPOSection(minibatch_size=5, old_log_probs="engine"),
]


@pytest.mark.parametrize("ppo", WITH_CRITIC)
@pytest.mark.parametrize(("count", "critics"), [(2, 1), (3, 1), (5, 3)])
def test_a_critic_on_workers_of_its_own_changes_nothing(ppo: PPOSection, count: int, critics: int):
    with plain_models():
        whole = one_step(ppo)
        outcomes = on_workers(count, lambda w: one_step(ppo, w, tokens=40, critic_workers=critics))

    for rank, outcome in enumerate(outcomes):
        trains_policy = rank < count - critics
        assert (outcome.policy == []) == (not trains_policy or not whole.policy)
        assert bool(outcome.critic) != trains_policy
        unseen = replace(whole, **{"critic" if trains_policy else "policy": []})
        assert_same(outcome, unseen)
    for team in (outcomes[: count - critics], outcomes[count - critics :]):
        rows = [int(each) for outcome in team for each in outcome.experience.group_index]
        assert sorted(rows) == sorted(whole.experience.group_index.tolist())


@pytest.mark.parametrize("count", [1, 2])
def test_before_the_policy_moves_its_ratio_is_exactly_one(
    count: int, monkeypatch: pytest.MonkeyPatch
):
    """Old and new log-probs come of one cut: in float32 rounding would show."""
    monkeypatch.setattr(PlainModel, "dtype", torch.float32)
    ppo = PPOSection(advantage="reinforce", minibatch_size=5, num_epochs=2)
    with plain_models():
        outcomes = on_workers(count, lambda w: one_step(ppo, w, tokens=25, rate=0.0))
    for outcome in outcomes:
        assert outcome.figures["ppo/policy_updates"] == 6
        assert outcome.figures["ppo/ratio_mean"] == 1.0
        assert outcome.figures["ppo/approx_kl"] == outcome.figures["ppo/clip_fraction"] == 0.0


def test_every_worker_runs_as_many_microbatches():
    """Under ZeRO-3 each gathers weights from all: one fewer, and the others wait for ever."""

    def pieces(workers: Workers) -> list[int]:
        whole = to_experience(list(group(0)))
        learner = plain_learner(PPOSection(advantage="reinforce"), workers, tokens=1)
        rows = torch.arange(3 if workers.rank == 0 else workers.rank - 1)
        return [len(piece) for piece in learner._microbatches(whole, rows)]

    with plain_models():
        assert on_workers(3, pieces) == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]


def test_the_combinations_meet_each_other():
    everyone = list(combinations())
    assert {p.advantage for p in everyone} == set(ESTIMATORS)
    assert {p.policy_loss for p in everyone} == set(LOSSES)
    cases = [p for p in everyone if p.advantage in ESTIMATORS[:6] and p.policy_loss in LOSSES[:7]]
    for left, right in (
        (lambda p: p.policy_loss, lambda p: p.aggregation),
        (lambda p: p.policy_loss, lambda p: p.correction.kind),
        (lambda p: p.aggregation, lambda p: p.correction.kind),
        (lambda p: p.advantage, lambda p: p.aggregation),
        (lambda p: p.advantage, lambda p: p.policy_loss),
    ):
        pairs = {(left(p), right(p)) for p in cases}
        assert pairs == set(itertools.product({x for x, _ in pairs}, {y for _, y in pairs}))
    assert {p.correction.kind for p in cases} == set(CORRECTIONS)
