"""The update's figures, by hand: means over tokens or optimizer steps, whatever the cut."""

import pytest
import torch

from raypo.collectives import Workers
from raypo.learner.statistics import UpdateSums
from raypo.ppo.objective import PolicyOutput

POLICY = ("tokens", "ratio", "clipped", "dual_clipped", "clamped", "approx_kl", "entropy")


def output(loss: float, *sums: float) -> PolicyOutput:
    statistics = {name: torch.tensor(v) for name, v in zip(POLICY, sums, strict=True)}
    terms = torch.tensor(loss / 2), torch.tensor(loss / 4)
    return PolicyOutput(torch.tensor(0.0), torch.tensor(loss), *terms, statistics)


def test_the_figures_of_two_optimizer_steps_by_hand():
    statistics = UpdateSums()
    # losses are parts of their optimizer step's, so those of its microbatches add up
    statistics.add_policy(output(1.0, 6.0, 6.0, 1.0, 0.0, 0.0, 0.5, 3.0))
    statistics.add_policy(output(2.0, 2.0, 3.0, 1.0, 1.0, 1.0, 0.5, 2.0))
    statistics.add_value(torch.tensor(4.0), {"tokens": torch.tensor(8), "clipped": torch.tensor(2)})
    statistics.end_step("policy", applied=True, grad_norm=3.0)
    statistics.end_step("critic", applied=True, grad_norm=8.0)
    statistics.add_policy(output(5.0, 2.0, 3.0, 2.0, 0.0, 0.0, 1.0, 0.0))
    statistics.add_value(torch.tensor(8.0), {"tokens": torch.tensor(2), "clipped": torch.tensor(0)})
    statistics.end_step("policy", applied=False, grad_norm=None)
    statistics.end_step("critic", applied=True, grad_norm=4.0)

    update = statistics.reduce(Workers())
    assert update.entropy == 5 / 10
    assert update.metrics == pytest.approx(
        {
            "ppo/policy_loss": (1.0 + 2.0 + 5.0) / 2,
            "ppo/kl_loss": (0.5 + 1.0 + 2.5) / 2,
            "ppo/nll_loss": (0.25 + 0.5 + 1.25) / 2,
            "ppo/ratio_mean": 12 / 10,
            "ppo/clip_fraction": 4 / 10,
            "ppo/dual_clip_fraction": 1 / 10,
            "ppo/approx_kl": 2 / 10,
            "ppo/entropy": 5 / 10,
            "ppo/ratio_clamped_tokens": 1.0,
            "ppo/value_loss": (4.0 + 8.0) / 2,
            "ppo/value_clip_fraction": 2 / 10,
            "ppo/policy_grad_norm": 3.0,
            "ppo/critic_grad_norm": 6.0,
            "ppo/policy_updates": 2.0,
            "ppo/skipped_updates": 1.0,
        }
    )


def test_no_number_is_asked_of_the_device_before_the_step_is_over():
    """A tensor without data has none, and a GPU would be waited for."""
    statistics, nothing = UpdateSums(), torch.zeros((), device="meta")
    for _ in range(2):
        terms = {name: nothing for name in POLICY}
        statistics.add_policy(PolicyOutput(nothing, nothing, nothing, nothing, terms))
        statistics.add_value(nothing, {"tokens": nothing, "clipped": nothing})
