"""A loss, an advantage, a score shaping, a reward of named parts and a callback of one's own."""

import torch
from torch import Tensor

from raypo import Rollout, StepRewards, StepScores, StepView, SurrogateInputs


def right_digits(rollouts: list[Rollout]) -> list[dict[str, float]]:
    """`score` is trained on; `exact` and `length` become `reward/exact`, `reward/length`."""
    return [
        {
            "score": exact + 0.2 * length,
            "exact": exact,
            "length": length,
        }
        for rollout in rollouts
        for exact in [float(rollout.response == rollout.label)]
        for length in [float(len(rollout.response) == len(rollout.label))]
    ]


def spo(inputs: SurrogateInputs) -> Tensor:
    """[B, T]: a parabola whose top is at the clip of PPO, so the gradient turns where PPO's ends.

    Paper: Xie et al. 2024, arXiv:2401.16025 (Simple Policy Optimization).
    """
    ratio = inputs.log_ratio.exp()
    bend = inputs.advantages.abs() / (2 * inputs.clip_high)
    return -(ratio * inputs.advantages - bend * (ratio - 1).square())


def over_the_median(step: StepRewards) -> Tensor:
    """[B]: the score less the median of its group; a lucky answer moves the median little."""
    advantages = torch.zeros_like(step.scores)
    for group in step.group_index.unique():
        rows = (step.group_index == group) & step.valid
        if rows.any():
            advantages[rows] = step.scores[rows] - step.scores[rows].median()
    return advantages


def ranks(step: StepScores) -> Tensor:
    """[B]: the share of the step's responses that a score is above: from 0 to below 1."""
    shaped = torch.zeros_like(step.scores)
    kept = step.scores[step.valid]
    shaped[step.valid] = (kept.unsqueeze(1) > kept).float().mean(1)
    return shaped


def distinct(step: StepView) -> dict[str, float]:
    """The share of responses that are unlike all others of the step."""
    responses = [each.response for each in step.rollouts]
    return {"mine/distinct": len(set(responses)) / len(responses)}
