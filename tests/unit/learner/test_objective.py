"""What is minimised, by hand: the surrogate, less the entropy bonus, plus the KL term."""

import math

import pytest
import torch

from raypo.config import PPOSection
from raypo.ppo.objective import StepCounts, policy_objective
from raypo.ppo.surrogates import SURROGATES
from tests.unit.test_types import batch


def test_the_terms_and_their_signs_by_hand():
    old = torch.full((2, 2), -1.0)
    experience = batch().with_(
        old_log_probs=old,
        advantages=torch.tensor([[2.0, -1.0], [3.0, 0.0]]),
        ref_log_probs=old - torch.tensor([[1.0, 2.0], [0.0, 9.0]]),
    )
    log_probs = old.clone().requires_grad_()
    entropy = torch.tensor([[0.5, 1.0], [1.5, 9.0]], requires_grad=True)
    ppo = PPOSection.model_validate(
        {
            "advantage": "grpo",
            "entropy_coef": 9.0,
            "nll_coef": 0.3,
            "kl": {"coef": 9.0, "estimator": "k2", "placement": "loss"},
        }
    )

    output = policy_objective(
        log_probs,
        entropy,
        experience,
        ppo=ppo,
        # as many lie on another worker
        counts=StepCounts(tokens=6, sequences=4, responses=4, positive_tokens=4),
        max_new_tokens=2,
        surrogate=SURROGATES["ppo"],
        kl_coef=0.4,  # the controllers', not the section's
        entropy_coef=0.1,
    )
    output.loss.backward()

    surrogate, bonus, divergence = -(2 - 1 + 3) / 6, (0.5 + 1.0 + 1.5) / 6, (0.5 + 2.0) / 6
    assert output.policy_loss.item() == pytest.approx(surrogate)
    assert output.kl_loss is not None
    assert output.kl_loss.item() == pytest.approx(divergence)
    likelihood = -(1.0 + 1.0) / 4  # the first response has a score of 1
    assert output.nll_loss is not None
    assert output.nll_loss.item() == pytest.approx(-likelihood)
    assert output.loss.item() == pytest.approx(
        surrogate - 0.1 * bonus + 0.4 * divergence - 0.3 * likelihood
    )
    assert output.statistics["entropy"].item() == 3.0
    torch.testing.assert_close(
        entropy.grad, torch.tensor([[-0.1, -0.1], [-0.1, 0.0]]) / 6
    )  # downhill is more entropy
    torch.testing.assert_close(
        log_probs.grad,
        torch.tensor([[-2 + 0.4 * 1, 1 + 0.4 * 2], [-3.0, 0.0]]) / 6  # -A + coef * l
        - torch.tensor([[0.3, 0.3], [0.0, 0.0]]) / 4,
    )


@pytest.mark.parametrize("is_first", [True, False])
def test_a_kl_with_importance_weights_counts_tokens_as_the_policy_samples_them_now(is_first: bool):
    """k3 of l = 1 is 1 / e; with its ratio its slope at ratio 1 is l itself."""
    log_probs = torch.full((2, 2), -0.5, requires_grad=True)
    weights = torch.tensor([[0.5, 2.0], [0.0, 9.0]])
    experience = batch().with_(
        advantages=torch.zeros(2, 2), ref_log_probs=torch.full((2, 2), -1.5), weights=weights
    )
    if not is_first:
        experience = experience.with_(old_log_probs=torch.full((2, 2), -1.0))
    kl = {"coef": 1.0, "estimator": "k3", "placement": "loss", "importance_weights": True}

    output = policy_objective(
        log_probs,
        torch.zeros(2, 2),
        experience,
        ppo=PPOSection.model_validate({"advantage": "grpo", "kl": kl}),
        counts=StepCounts(tokens=3, sequences=2, responses=2),
        max_new_tokens=2,
        surrogate=SURROGATES["ppo"],
        kl_coef=1.0,
    )
    output.loss.backward()

    ratio = 1.0 if is_first else math.exp(0.5)
    assert output.loss.item() == pytest.approx(ratio * math.exp(-1) * (0.5 + 2.0 + 0.0) / 3)
    expected = ratio * torch.tensor([[0.5, 2.0], [0.0, 0.0]]) / 3
    torch.testing.assert_close(log_probs.grad, expected)
