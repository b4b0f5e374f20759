"""Where a step is one update, its old log-probs are the new ones: no pass is made for them."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from raypo.config import PPOSection
from raypo.models.networks import Policy
from raypo.rollout.sharding import to_experience
from tests.unit.learner.plain import Outcome, one_step, plain_models
from tests.unit.learner.test_knobs import section

ONE = {"advantage": "grpo", "kl.placement": "loss", "kl.estimator": "k3", "minibatch_size": 12}
"""All twelve responses in one minibatch, one epoch, the KL in the loss."""


def step_and_passes(keys: dict, **how) -> tuple[Outcome, int]:
    """The step, and how many passes of the policy it made."""
    with plain_models():
        one_step(section(keys), **how)  # the groups are sampled once for all tests
    forward, passes = Policy.forward, 0

    def counted(*args, **more):
        nonlocal passes
        passes += 1
        return forward(*args, **more)

    with patch.object(Policy, "forward", counted), plain_models():
        outcome = one_step(section(keys), **how)
    return outcome, passes


@pytest.mark.parametrize("tokens", [10_000, 30])
def test_the_step_is_the_same_with_half_the_passes(tokens: int):
    once, passes = step_and_passes(ONE, tokens=tokens)
    with patch.object(PPOSection, "computes_old_log_probs", lambda *_, **__: True):
        twice, more_passes = step_and_passes(ONE, tokens=tokens)

    assert more_passes == 2 * passes
    assert once.figures == pytest.approx(twice.figures, rel=1e-6, abs=1e-7)  # kept as float32
    torch.testing.assert_close(once.policy[0], twice.policy[0], rtol=1e-6, atol=1e-7)
    mine, theirs = once.experience.old_log_probs, twice.experience.old_log_probs
    assert mine is not None
    assert theirs is not None
    assert torch.equal(mine, theirs)
    assert once.figures["ppo/ratio_mean"] == 1.0


def test_while_the_critic_warms_up_no_graph_of_the_policy_is_kept():
    warming = {"critic_warmup_steps": 1, "kl.coef": 0.0, "minibatch_size": 12}
    with plain_models():
        old_log_probs = one_step(section(warming)).experience.old_log_probs
    assert old_log_probs is not None
    assert not old_log_probs.requires_grad


@pytest.mark.parametrize(
    "keys",
    [
        {"num_epochs": 2},
        {"minibatch_size": 6},
        {"kl.placement": "reward", "kl.estimator": "k1"},
        {"correction.kind": "tis"},
        {"top_entropy_fraction": 0.2},
    ],
    ids=str,
)
def test_old_log_probs_that_something_reads_are_made_first(keys: dict):
    _, passes = step_and_passes(ONE | keys)

    pieces = 2 if "minibatch_size" in keys else 1
    assert passes == pieces * (1 + keys.get("num_epochs", 1))


def test_the_engines_log_probs_take_no_pass_and_are_what_the_ratio_compares_with():
    keys = {"num_epochs": 2, "old_log_probs": "engine"}
    outcome, passes = step_and_passes(ONE | keys)

    assert passes == 2
    experience = outcome.experience
    assert experience.old_log_probs is not None
    assert torch.equal(experience.old_log_probs, experience.rollout_log_probs)


@pytest.mark.parametrize(
    "keys", [{}, {"advantage": "rloo", "kl.placement": "reward", "kl.estimator": "k1"}]
)
def test_a_token_whose_log_prob_the_engine_does_not_know_is_not_learned_from(keys: dict):
    def forgetful(dealt: Any, **parts: Any) -> Any:
        experience = to_experience(dealt, **parts)
        log_probs = experience.rollout_log_probs.clone()
        log_probs[0, 0] = float("nan")
        return experience.with_(rollout_log_probs=log_probs)

    with patch("tests.unit.learner.plain.to_experience", forgetful), plain_models():
        outcome = one_step(section({"old_log_probs": "engine", "minibatch_size": 12} | keys))
    assert outcome.figures["mismatch/unknown_tokens"] == 1
    assert outcome.figures["ppo/skipped_updates"] == 0
    assert outcome.experience.loss_mask is not None
    assert outcome.experience.loss_mask.sum() == outcome.experience.response_mask.sum() - 1
    kept = outcome.experience
    assert kept.ref_log_probs is not None
    assert kept.old_log_probs is not None
    assert kept.old_log_probs[0, 0] == kept.ref_log_probs[0, 0], "it has no KL"
