"""Every key of the `ppo` section changes the number that it claims to change."""

import math
from typing import Any, NamedTuple

import pytest
import torch

from raypo.collectives import Workers
from raypo.config import PPOSection, flatten
from raypo.config.fields import known_keys
from raypo.ppo.controllers import UpdateState
from raypo.ppo.kl import KLController
from tests.unit.learner.plain import Outcome, on_workers, one_step, plain_learner, plain_models


class Case(NamedTuple):
    """`without` and `with_` differ in one key; `changes` is what differs in what comes out."""

    without: dict[str, Any]
    with_: dict[str, Any]
    changes: str
    stays: str | None = None


ADAPTIVE = {"kl.controller": "adaptive", "kl.target": 0.1, "kl.horizon": 100.0}
GRPO = {"advantage": "grpo"}
FILTER = {**GRPO, "filter.enabled": True}
K2_LOSS = {"kl.estimator": "k2", "kl.placement": "loss"}
MIS = {"correction.kind": "mis", "correction.low": 0.5, "correction.high": 2.0}
CLIP_COV = {
    "policy_loss": "clip_cov",
    "covariance.fraction": 0.2,
    "covariance.low": -1.0,
    "covariance.high": 9.0,
}
KL_COV = {"policy_loss": "kl_cov", "covariance.fraction": 0.2}
ENTROPY = {"entropy_coef": 0.1, "entropy_target": 9.0}
DROPPED = "mismatch/dropped_fraction"
LENGTH = "rollout/samples_trained"
CASES = {
    "preset": Case({}, {"preset": "grpo"}, "policy"),
    "advantage": Case({}, GRPO, "advantages"),
    "part_weights": Case(
        {"advantage": "gdpo", "kl.coef": 0.0, "part_weights": {"right": 1.0}},
        {"advantage": "gdpo", "kl.coef": 0.0, "part_weights": {"right": 1.0, "model": 2.0}},
        "advantages",
    ),
    "pass_k": Case(
        {"advantage": "pass_at_k", "pass_k": 2},
        {"advantage": "pass_at_k", "pass_k": 3},
        "advantages",
    ),
    "policy_loss": Case({}, {"policy_loss": "cispo"}, "policy"),
    "old_log_probs": Case({}, {"old_log_probs": "engine"}, "policy"),
    "advantage_clip": Case({}, {"advantage_clip": 0.5}, "advantages", stays="critic"),
    "mask_truncated": Case({}, {"mask_truncated": True}, "policy"),
    "cispo_low": Case(
        {"policy_loss": "cispo"}, {"policy_loss": "cispo", "cispo_low": 0.01}, "policy"
    ),
    "nll_coef": Case({}, {"nll_coef": 0.5}, "policy", stays="critic"),
    "nll_min_score": Case({"nll_coef": 0.5}, {"nll_coef": 0.5, "nll_min_score": 0.0}, "policy"),
    "covariance.fraction": Case(KL_COV, {**KL_COV, "covariance.fraction": 0.5}, "policy"),
    "covariance.low": Case(CLIP_COV, {**CLIP_COV, "covariance.low": 0.2}, "policy"),
    "covariance.high": Case(CLIP_COV, {**CLIP_COV, "covariance.high": 0.2}, "policy"),
    "covariance.penalty": Case(KL_COV, {**KL_COV, "covariance.penalty": 5.0}, "policy"),
    "aggregation": Case({}, {"aggregation": "constant"}, "policy", stays="critic"),
    "gamma": Case({}, {"gamma": 0.5}, "advantages"),
    "discount_by": Case({"gamma": 0.5}, {"gamma": 0.5, "discount_by": "turn"}, "advantages"),
    "gae_lambda": Case({}, {"gae_lambda": 0.1}, "advantages"),
    "lambda_alpha": Case(
        {"gae_lambda": "adaptive", "lambda_alpha": 0.5},
        {"gae_lambda": "adaptive", "lambda_alpha": 2.0},
        "advantages",
    ),
    "critic_lambda": Case({}, {"critic_lambda": 1.0}, "critic", stays="policy"),
    "bootstrap_truncated": Case({}, {"bootstrap_truncated": True}, "critic"),
    "clip_low": Case({}, {"clip_low": 0.001}, "policy", stays="critic"),
    "clip_high": Case({}, {"clip_high": 0.001}, "policy", stays="critic"),
    "dual_clip": Case({"clip_high": 9.0}, {"clip_high": 9.0, "dual_clip": 1.0001}, "policy"),
    "value_clip": Case({}, {"value_clip": 0.001}, "critic", stays="policy"),
    "num_epochs": Case({}, {"num_epochs": 3}, "ppo/policy_updates"),
    "minibatch_size": Case({}, {"minibatch_size": 6}, "ppo/policy_updates"),
    "critic_warmup_steps": Case(
        {"critic_lambda": 1.0},
        {"critic_lambda": 1.0, "critic_warmup_steps": 1},
        "policy",
        stays="critic",
    ),
    "entropy_coef": Case({}, {"entropy_coef": 0.5}, "policy", stays="critic"),
    "entropy_target": Case({"entropy_coef": 0.1}, ENTROPY, "next_entropy_coef", stays="policy"),
    "entropy_delta": Case(
        ENTROPY, {**ENTROPY, "entropy_delta": 0.1}, "next_entropy_coef", stays="policy"
    ),
    "top_entropy_fraction": Case({}, {"top_entropy_fraction": 0.3}, "policy", stays="critic"),
    "kl.importance_weights": Case(K2_LOSS, {**K2_LOSS, "kl.importance_weights": True}, "policy"),
    "kl.coef": Case({}, {"kl.coef": 0.5}, "advantages"),
    "kl.estimator": Case(K2_LOSS, {**K2_LOSS, "kl.estimator": "k3"}, "ppo/kl_loss"),
    # No estimator fits both places: k1's loss has no gradient, and no other is right in the reward.
    "kl.placement": Case({}, K2_LOSS, "ppo/kl_loss"),
    "kl.controller": Case({}, ADAPTIVE, "next_coef", stays="policy"),
    "kl.target": Case(ADAPTIVE, {**ADAPTIVE, "kl.target": 50.0}, "next_coef"),
    "kl.horizon": Case(ADAPTIVE, {**ADAPTIVE, "kl.horizon": 200.0}, "next_coef"),
    "shaping.function": Case(
        {},
        {"shaping.function": "examples/own_functions/functions.py:ranks"},
        "ppo/shaped_score_mean",
    ),
    "shaping.overlong_buffer_tokens": Case(
        {}, {"shaping.overlong_buffer_tokens": 4}, "ppo/shaped_score_mean"
    ),
    "shaping.overlong_factor": Case(
        {"shaping.overlong_buffer_tokens": 4},
        {"shaping.overlong_buffer_tokens": 4, "shaping.overlong_factor": 3.0},
        "ppo/shaped_score_mean",
    ),
    "shaping.truncated_score": Case({}, {"shaping.truncated_score": -3.0}, "ppo/shaped_score_mean"),
    "shaping.truncated_scale": Case({}, {"shaping.truncated_scale": 0.1}, "ppo/shaped_score_mean"),
    "shaping.normalize": Case({}, {"shaping.normalize": True}, "ppo/shaped_score_mean"),
    "shaping.clip_low": Case({}, {"shaping.clip_low": 0.2}, "ppo/shaped_score_mean"),
    "shaping.clip_high": Case({}, {"shaping.clip_high": -0.2}, "ppo/shaped_score_mean"),
    "filter.enabled": Case(GRPO, FILTER, "rollout/samples_filtered"),
    "filter.min_std": Case(FILTER, {**FILTER, "filter.min_std": 0.6}, "rollout/samples_filtered"),
    "filter.low": Case(FILTER, {**FILTER, "filter.low": 0.2}, "rollout/samples_filtered"),
    "filter.high": Case(FILTER, {**FILTER, "filter.high": 0.0}, "rollout/samples_filtered"),
    "filter.max_refills": Case(FILTER, {**FILTER, "filter.max_refills": 0}, LENGTH),
    "correction.kind": Case({}, {"correction.kind": "tis"}, "policy", stays="critic"),
    "correction.cap": Case(MIS, {**MIS, "correction.cap": 1.01}, "mismatch/weight_mean"),
    "correction.low": Case(MIS, {**MIS, "correction.low": 0.99}, DROPPED),
    "correction.high": Case(MIS, {**MIS, "correction.high": 1.01}, DROPPED),
    "correction.mask_ratio": Case(MIS, {**MIS, "correction.mask_ratio": "product"}, DROPPED),
    "correction.max_staleness": Case({}, {"correction.max_staleness": 0}, "policy"),
    "correction.off_policy_mask": Case(
        {}, {"correction.off_policy_mask": 0.01}, "policy", stays="critic"
    ),
    "correction.token_veto": Case({}, {"correction.token_veto": 0.8}, DROPPED),
}


def section(keys: dict[str, Any]) -> PPOSection:
    """A section of dotted keys; two minibatches, so that the second meets ratios apart from 1."""
    tree: dict[str, Any] = {"minibatch_size": 4, "kl": {"coef": 0.1}}
    if "preset" in keys:
        del tree["kl"]
    for key, value in keys.items():
        *sections, last = key.split(".")
        node = tree
        for name in sections:
            node = node.setdefault(name, {})
        node[last] = value
    return PPOSection.model_validate(tree)


def number(outcome: Outcome, name: str) -> torch.Tensor:
    if name in ("policy", "critic"):
        gradients = getattr(outcome, name)
        return torch.cat(gradients) if gradients else torch.zeros(0)
    if name == "advantages":
        advantages = outcome.experience.advantages
        assert advantages is not None
        return advantages
    if name == "next_entropy_coef":
        return torch.tensor(outcome.state.entropy.acting, dtype=torch.float64)
    if name == "next_coef":
        return torch.tensor(outcome.state.kl.coef, dtype=torch.float64)
    return torch.tensor(outcome.figures.get(name, math.nan), dtype=torch.float64)


def test_every_key_has_a_case():
    sections = {"kl", "covariance", "shaping", "filter", "correction"}
    assert set(known_keys(PPOSection)) - sections == set(CASES)
    assert set(flatten(PPOSection().model_dump())) == set(CASES)


@pytest.mark.parametrize("key", CASES)
def test_the_knob_changes_what_it_claims(key: str):
    case = CASES[key]
    with plain_models():
        without, with_ = one_step(section(case.without)), one_step(section(case.with_))

    changed = [number(outcome, case.changes) for outcome in (without, with_)]
    assert changed[0].shape != changed[1].shape or not torch.allclose(*changed, rtol=1e-4)
    if case.stays:
        same = [number(outcome, case.stays) for outcome in (without, with_)]
        torch.testing.assert_close(*same)


# What the numbers are


def test_a_kl_in_the_loss_has_the_gradient_of_its_term_alone_and_leaves_the_reward():
    loss = {"advantage": "reinforce", "kl.placement": "loss", "kl.estimator": "k2"}
    with plain_models():
        none, weak, strong = (
            one_step(section({**loss, "kl.coef": c, "minibatch_size": 12})) for c in (0, 0.1, 0.2)
        )

    torch.testing.assert_close(weak.experience.advantages, none.experience.advantages)
    weak_pull, strong_pull = (o.policy[0] - none.policy[0] for o in (weak, strong))
    torch.testing.assert_close(strong_pull, 2 * weak_pull, rtol=1e-4, atol=1e-6)
    assert weak_pull.norm() > 0
    assert weak.figures["kl/coef"] == 0.1
    assert "kl/coef" not in none.figures


def test_masked_truncated_responses_train_nothing_and_are_in_no_denominator():
    keys = {"advantage": "grpo", "kl.coef": 0, "minibatch_size": 12, "aggregation": "sequence_mean"}
    with plain_models():
        masked = one_step(section({**keys, "mask_truncated": True}))
        batch = masked.experience
        assert 0 < int(batch.truncated.sum()) < len(batch)
        learner = plain_learner(section(keys), Workers())
        ended = batch.with_(loss_mask=batch.response_mask).select(~batch.truncated)
        learner.update(ended, step=1)

    torch.testing.assert_close(masked.policy, plain_gradients(learner))
    advantages = batch.advantages
    assert advantages is not None
    assert advantages[batch.truncated].abs().sum() > 0  # their scores were compared all the same


def plain_gradients(learner: Any) -> list[torch.Tensor]:
    return learner._policy.gradients


def test_the_entropy_bonus_acts_after_a_step_below_its_target():
    low, high = (
        section({"entropy_target": target, "entropy_coef": 0.1, "entropy_delta": 0.02})
        for target in (0.1, 9.0)
    )
    with plain_models():
        enough, too_little = one_step(low), one_step(high)
        resumed = UpdateState.initial(low).restored(enough.state.state_dict())

    assert enough.figures["ppo/entropy_coef"] == too_little.figures["ppo/entropy_coef"] == 0.1
    assert enough.state.entropy.acting == 0.0
    assert enough.state.entropy.coef == pytest.approx(0.08)
    assert too_little.state.entropy.acting == pytest.approx(0.12)
    assert resumed.entropy == enough.state.entropy


def test_the_controller_takes_the_kl_of_a_response_and_the_next_step_starts_from_it():
    ppo = section({**ADAPTIVE, "kl.target": 1.0})
    with plain_models():
        outcome = one_step(ppo)

    expected = KLController(0.1, target=1.0, horizon=100.0).updated(
        outcome.figures["kl/ref_response_mean"], 12
    )
    assert outcome.state.kl == expected
    assert outcome.figures["kl/coef"] == 0.1


def test_bug_7_a_warming_critic_leaves_the_policy_and_the_kl_coefficient_alone():
    with plain_models():
        warming = one_step(section({**ADAPTIVE, "critic_warmup_steps": 1}))
        after = one_step(section({**ADAPTIVE, "critic_warmup_steps": 1}), step=2)
        never = one_step(section(ADAPTIVE), step=2)
        monte_carlo = one_step(section({**ADAPTIVE, "critic_lambda": 1.0}))

    torch.testing.assert_close(warming.experience.returns, monte_carlo.experience.returns)
    assert warming.policy == []
    assert len(warming.critic) == 3
    assert warming.state.kl.coef == 0.1
    assert "ppo/policy_loss" not in warming.figures
    torch.testing.assert_close(after.policy, never.policy)  # nothing of the warm-up is left
    assert after.figures == never.figures


def test_a_truncated_response_goes_on_with_the_value_after_its_last_token():
    with plain_models():
        outcome = one_step(section({"bootstrap_truncated": True}))
    batch = outcome.experience
    assert batch.last_values is not None
    assert batch.last_values[~batch.truncated].abs().sum() == 0
    assert bool((batch.last_values[batch.truncated] != 0).all())


def test_a_lag_has_figures_of_its_own():
    with plain_models():
        figures = one_step(section({})).figures  # the draw with index 1 is one version behind
    assert figures["mismatch/kl_lag_0"] != figures["mismatch/kl_lag_1"]
    assert "mismatch/kl_lag_2" not in figures


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_whose_groups_are_all_filtered_updates_nothing(count: int):
    ppo = section({**FILTER, "filter.min_std": 99.0, "filter.max_refills": 1})
    with plain_models():
        outcomes = on_workers(count, lambda workers: one_step(ppo, workers))
    for outcome in outcomes:
        assert outcome.collected.missing_groups == 4
        assert outcome.policy == []
        assert outcome.figures["ppo/policy_updates"] == 0
        assert outcome.figures["rollout/samples_filtered"] == 24
