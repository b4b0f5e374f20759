"""A user's own loss, shaping and advantage: what they are given, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor

from examples.own_functions.functions import over_the_median, ranks, spo
from raypo.ppo.custom_functions import (
    CustomFunctionError,
    StepRewards,
    StepScores,
    custom_advantages,
    custom_scores,
    custom_surrogate,
)
from raypo.ppo.surrogates import SurrogateInputs, TokenLoss
from raypo.ppo.surrogates import ppo as ppo_surrogate
from tests.unit.ppo.steps import policy_loss, random_step

LABEL = "ppo.policy_loss (mine.py:loss)"
STEP = random_step(0, rows=6)


def loss_of(function: Any, **knobs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    return policy_loss(*STEP.policy(), kind=custom_surrogate(function, LABEL), **knobs)


def gradient(loss: Tensor) -> Tensor:
    return torch.autograd.grad(loss, STEP.log_probs, retain_graph=True)[0]


def test_raypos_own_surrogate_by_a_function_is_the_same_loss_and_statistics():
    expected, statistics = policy_loss(*STEP.policy(), kind="ppo")
    for function in (ppo_surrogate, lambda tokens: ppo_surrogate(tokens)):
        loss, told = loss_of(function)
        assert loss == expected
        assert told == statistics
        assert torch.equal(gradient(loss), gradient(expected))


def test_a_function_that_gives_only_losses_is_masked_averaged_and_counted():
    loss, told = loss_of(lambda tokens: tokens.log_probs * 2.0)
    kept = STEP.log_probs[STEP.mask]
    torch.testing.assert_close(loss, 2.0 * kept.mean())
    assert told["clipped"] == 0
    assert told["ratio"] == policy_loss(*STEP.policy())[1]["ratio"]
    assert torch.equal(gradient(loss) != 0, STEP.mask)


def test_what_a_function_says_of_masked_tokens_counts_for_nothing():
    def rubbish(tokens: SurrogateInputs) -> Tensor:
        return torch.where(tokens.mask, tokens.log_probs, torch.nan)

    loss, _ = loss_of(rubbish)
    torch.testing.assert_close(loss, STEP.log_probs[STEP.mask].mean())
    assert gradient(loss).isfinite().all()


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda tokens: tokens.log_probs.sum(), r"shape \(\)\. Return one of shape \[B, T\]"),
        (lambda tokens: tokens.log_probs.detach(), "the loss has no gradient"),
        (lambda tokens: tokens.log_probs / 0.0, "returned NaN or infinity in"),
        (lambda tokens: tokens.mask.long(), r"returned a tensor of torch.int64"),
        (lambda tokens: 1.0, "returned float. Return a tensor of shape"),
        (lambda tokens: tokens.rewards, "raised AttributeError: .*rewards.* Correct the function"),
        (lambda t: TokenLoss(t.log_probs[:1], t.mask, t.mask, t.mask), r"tensor of shape \(1, "),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused_by_its_key(function: Any, told: str):
    with pytest.raises(CustomFunctionError, match=told) as caught:
        loss_of(function)
    assert str(caught.value).startswith(LABEL)


def step_scores(scores: list[float], valid: list[bool] | None = None) -> StepScores:
    count = len(scores)
    return StepScores(
        scores=torch.tensor(scores),
        valid=torch.tensor(valid or [True] * count),
        num_tokens=torch.ones(count, dtype=torch.int64),
        truncated=torch.zeros(count, dtype=torch.bool),
        group_index=torch.zeros(count, dtype=torch.int64),
        sample_index=torch.arange(count),
        max_new_tokens=4,
    )


def step_rewards() -> StepRewards:
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]], dtype=torch.bool)
    scores = torch.tensor([1.0, 2.0, 9.0, 0.0])
    return StepRewards(
        scores=scores,
        rewards=torch.zeros(4, 2),
        mask=mask,
        valid=mask.any(1),
        truncated=torch.zeros(4, dtype=torch.bool),
        group_index=torch.tensor([7, 7, 7, 7]),
        sample_index=torch.arange(4),
        gamma=1.0,
    )


def test_shaped_scores_leave_out_what_was_not_judged():
    shaped = custom_scores(ranks, step_scores([5.0, 0.0, 7.0], [True, False, True]), "key")
    assert shaped[[0, 2]].tolist() == [0.0, 0.5]
    assert shaped[1].isnan()


def test_an_advantage_of_each_response_is_that_of_each_of_its_tokens():
    by_row = custom_advantages(over_the_median, step_rewards(), "key")
    assert by_row.tolist() == [[-1.0, -1.0], [0.0, 0.0], [7.0, 7.0], [0.0, 0.0]]
    by_token = custom_advantages(lambda step: step.rewards + 2.0, step_rewards(), "key")
    assert by_token.tolist() == [[2.0, 2.0], [2.0, 0.0], [2.0, 2.0], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            torch.zeros(3),
            r"\(3,\)\. Return one of shape \[B, T\] = \(4, 2\) or \[B\] = \(4,\)",
        ),
        (torch.tensor([1.0, torch.nan, 0.0, 0.0]), "NaN or infinity in 1 of 5 unmasked"),
        (torch.zeros(4, dtype=torch.bool), "tensor of torch.bool"),
        (None, "returned NoneType"),
    ],
)
def test_advantages_that_cannot_be_used_are_refused(given: Any, told: str):
    with pytest.raises(CustomFunctionError, match=told):
        custom_advantages(lambda step: given, step_rewards(), "ppo.advantage (mine.py:f)")


def test_nan_where_nothing_counts_is_no_mistake():
    given = torch.tensor([1.0, 1.0, 1.0, torch.nan])  # the last response has no token
    assert custom_advantages(lambda step: given, step_rewards(), "key").isfinite().all()


def test_the_examples_loss_turns_where_ppos_gradient_ends():
    """Its top is at a ratio of 1 + clip_high for a positive advantage: slope 0 there."""
    for ratio, sign in ((1.1, -1.0), (1.2, 0.0), (1.3, 1.0)):
        log_ratio = torch.tensor([[ratio]]).log().requires_grad_()
        inputs = SurrogateInputs(
            log_probs=log_ratio,
            log_ratio=log_ratio,
            advantages=torch.ones(1, 1),
            mask=torch.ones(1, 1, dtype=torch.bool),
            clip_low=0.2,
            clip_high=0.2,
            dual_clip=None,
        )
        (slope,) = torch.autograd.grad(spo(inputs).sum(), log_ratio)
        assert torch.sign(slope.round(decimals=5)).item() == sign
