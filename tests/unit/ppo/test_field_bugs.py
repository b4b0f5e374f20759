"""Bugs seen in this field that live in a formula, each by its name."""

from typing import Any

import pytest
import torch

from raypo.models.token_log_probs import token_log_probs
from raypo.ppo.advantages import discounted_returns, generalized_advantages, token_rewards
from raypo.ppo.corrections import importance_weights
from raypo.ppo.kl import KLController, kl_statistics
from raypo.ppo.losses import aggregate, policy_loss, value_loss
from tests.unit.ppo.steps import INF, NAN, random_step


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("loss_of", [policy_loss, value_loss])
def test_bug_1_loss_is_not_scaled_by_the_microbatch_split(loss_of, aggregation):
    # responses of 1 and 3 tokens: a mean of micro-batch means would weigh them alike
    rows = random_step(0, rows=2, width=3)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    tensors = (rows.policy() if loss_of is policy_loss else rows.critic())[:3]
    knobs = {"aggregation": aggregation, "max_new_tokens": 3}
    whole, _ = loss_of(*tensors, mask, **knobs)
    normalizer = {"token_mean": 4, "sequence_mean": 2, "constant": 2}[aggregation]

    parts = [
        loss_of(*(x[i : i + 1] for x in tensors), mask[i : i + 1], normalizer=normalizer, **knobs)
        for i in range(2)
    ]

    torch.testing.assert_close(parts[0][0] + parts[1][0], whole)


BASE = {"clip_low": 0.2, "clip_high": 0.2, "aggregation": "token_mean", "max_new_tokens": 9}


@pytest.mark.parametrize(
    "changed",
    [
        {"kind": "gspo"},
        {"kind": "cispo"},
        {"kind": "sapo"},
        {"clip_low": 0.01},
        {"clip_high": 0.01},
        {"dual_clip": 1.01},
        {"aggregation": "sequence_mean"},
        {"aggregation": "constant"},
        {"aggregation": "constant", "max_new_tokens": 5},
        {"normalizer": 3},
        {"weights": torch.full((6, 7), 0.5)},
    ],
)
def test_bug_2_every_knob_of_the_policy_reaches_its_loss(changed):
    step = random_step(1)

    losses = [policy_loss(*step.policy(), **(BASE | knobs))[0].item() for knobs in ({}, changed)]

    assert losses[0] != losses[1]


@pytest.mark.parametrize(
    "changed", [{"value_clip": 0.01}, {"aggregation": "sequence_mean"}, {"normalizer": 3}]
)
def test_bug_2_every_knob_of_the_critic_reaches_its_loss(changed):
    step = random_step(1)

    losses = [value_loss(*step.critic(), **knobs)[0].item() for knobs in ({}, changed)]

    assert losses[0] != losses[1]


def test_bug_3_credit_crosses_what_an_environment_wrote_undiminished():
    mask = torch.tensor([[True, False, False, False, True]])
    rewards = torch.tensor([[0.0, NAN, 7.0, INF, 1.0]])
    values = torch.tensor([[0.5, NAN, 9.0, -INF, 0.25]])
    close: dict[str, Any] = {"gamma": 0.9, "gae_lambda": 0.8}

    advantages, returns = generalized_advantages(rewards, values, mask, **close)

    # as if the two sampled tokens stood side by side: A1 = 1 - 0.25,
    # A0 = 0.9 * 0.25 - 0.5 + 0.72 * 0.75; no power of gamma for the gap
    torch.testing.assert_close(advantages, torch.tensor([[0.265, 0.0, 0.0, 0.0, 0.75]]))
    torch.testing.assert_close(returns, torch.tensor([[0.765, 0.0, 0.0, 0.0, 1.0]]))
    reward_at_end = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1.0]])
    torch.testing.assert_close(
        discounted_returns(reward_at_end, mask, gamma=0.9),
        torch.tensor([[0.9, 0.0, 0.0, 0.0, 1.0]]),
    )


@pytest.mark.parametrize("kind", ["sequence_tis", "geometric_tis", "icepop", "mis"])
def test_bug_4_a_dropped_token_is_not_zero_times_infinity(kind):
    # the engine gave the first token (nearly) no probability: its ratio is out of every range
    old = torch.tensor([[-0.1, -0.1, NAN]])
    rollout = torch.tensor([[-INF, -0.1, -INF]])
    mask = torch.tensor([[True, True, False]])
    log_probs = old.clone().requires_grad_()

    weights = importance_weights(old, rollout, mask, kind=kind, low=0.5, high=2.0)
    loss, stats = policy_loss(
        log_probs, old, torch.full((1, 3), INF).masked_fill(mask, 1.0), mask, weights=weights
    )
    loss.backward()

    assert weights.isfinite().all()
    assert loss.isfinite()
    assert log_probs.grad is not None
    assert log_probs.grad.isfinite().all()
    assert stats["tokens"].item() == 2.0  # what is dropped stays in the denominator
    # nor is an infinite KL with a coefficient of 0, or behind the mask
    rewards = token_rewards(torch.ones(1), torch.full((1, 3), INF), mask, kl_coef=0.0)
    assert rewards.tolist() == [[0.0, 1.0, 0.0]]
    infinite = torch.where(mask, 1.0, INF)
    assert aggregate(infinite, mask, aggregation="token_mean").item() == 1.0


def test_bug_5_the_controller_is_fed_nats_a_response_not_nats_a_token():
    log_probs, reference = torch.full((2, 50), -1.0), torch.full((2, 50), -1.1)
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[1] = False  # a response without a sampled token counts for nothing
    stats = kl_statistics(log_probs, reference, mask)

    by_response = (stats["kl"] / mask.any(1).sum()).item()
    by_token = (stats["kl"] / stats["tokens"]).item()

    assert by_response == pytest.approx(5.0, rel=1e-5)  # 50 tokens of 0.1 nats
    assert by_token == pytest.approx(0.1, rel=1e-5)
    controller = KLController(0.1, target=1.0, horizon=100.0)
    assert controller.updated(by_response, 2).coef > 0.1 > controller.updated(by_token, 2).coef


def test_bug_14_entropy_is_that_of_the_tempered_logits():
    logits = torch.tensor([[[2.0, 0.0, -1.0]]])
    temperature = 0.5
    sampled_from = torch.distributions.Categorical(logits=logits / temperature)

    ids = torch.zeros(1, 1, dtype=torch.int64)
    _, entropy = token_log_probs(logits, ids, temperature=temperature, with_entropy=True)

    torch.testing.assert_close(entropy, sampled_from.entropy())
