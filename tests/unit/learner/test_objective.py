"""What is minimised, by hand: the surrogate, less the entropy bonus, plus the KL term."""

import pytest
import torch

from raypo.config import PPOSection
from raypo.learner.objective import StepCounts, policy_objective
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
            "entropy_coef": 0.1,
            "kl": {"coef": 9.0, "estimator": "k2", "placement": "loss"},
        }
    )

    output = policy_objective(
        log_probs,
        entropy,
        experience,
        ppo=ppo,
        counts=StepCounts(tokens=6, sequences=4, responses=4),  # as many lie on another worker
        max_new_tokens=2,
        kl_coef=0.4,  # the controller's, not the section's
    )
    output.loss.backward()

    surrogate, bonus, divergence = -(2 - 1 + 3) / 6, (0.5 + 1.0 + 1.5) / 6, (0.5 + 2.0) / 6
    assert output.policy_loss.item() == pytest.approx(surrogate)
    assert output.kl_loss is not None
    assert output.kl_loss.item() == pytest.approx(divergence)
    assert output.loss.item() == pytest.approx(surrogate - 0.1 * bonus + 0.4 * divergence)
    assert output.statistics["entropy"].item() == 3.0
    torch.testing.assert_close(
        entropy.grad, torch.tensor([[-0.1, -0.1], [-0.1, 0.0]]) / 6
    )  # downhill is more entropy
    torch.testing.assert_close(
        log_probs.grad,
        torch.tensor([[-2 + 0.4 * 1, 1 + 0.4 * 2], [-3.0, 0.0]]) / 6,  # -A + coef * l
    )
