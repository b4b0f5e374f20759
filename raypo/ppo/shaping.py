"""Score shaping: from a response's raw score to the score used for training.

Notation: B responses. Every mask: True = keep. `shape_scores` applies the parts in a fixed order:
custom function, overlong penalty, score of truncated responses, running normalisation, clip.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import ShapingSection
from raypo.ppo.custom_functions import custom_shaped_scores
from raypo.ppo.masked import MIN_VARIANCE, keep
from raypo.types import Experience


def overlong_penalty(
    scores: Tensor,  # [B]
    num_tokens: Tensor,  # [B] int
    *,
    max_tokens: int,
    buffer_tokens: int,
    factor: float = 1.0,
) -> Tensor:
    """Return scores minus a penalty that grows over the last tokens before the length limit.

    Args:
        scores: Score of each response.
        num_tokens: Sampled tokens of each response.
        max_tokens: Longest allowed response, in tokens.
        buffer_tokens: Number of tokens before the limit over which the penalty grows from 0 to
            `factor`.
        factor: Penalty at the limit.

    Returns:
        scores: [B].

    Paper: Yu et al. 2025, arXiv:2503.14476, eq. 13 (soft overlong punishment).
    """
    excess = (num_tokens - (max_tokens - buffer_tokens)).clamp(min=0, max=buffer_tokens)
    return scores - factor * excess.to(scores.dtype) / buffer_tokens


@dataclass(frozen=True)
class RunningMoments:
    """Count, mean and sum of squared deviations of all scores so far, by Welford's algorithm.

    Example: after 1, 2, 3 it has count 3, mean 2 and squared_deviation 2, so variance 2 / 3.

    Paper: Chan, Golub and LeVeque 1983, "Algorithms for Computing the Sample Variance".
    """

    count: float = 0.0
    mean: float = 0.0
    squared_deviation: float = 0.0

    @classmethod
    def of(cls, scores: Tensor, valid: Tensor | None = None) -> RunningMoments:
        """Return the moments of the scores [B] that are valid and not NaN.

        Args:
            scores: Score of each response.
            valid: True for scores to include, [B]. None means that all scores are valid.
        """
        valid = ~scores.isnan() if valid is None else valid.bool() & ~scores.isnan()
        exact = scores[valid].double()
        if exact.numel() == 0:
            return cls()
        mean = exact.mean()
        return cls(float(exact.numel()), float(mean), float((exact - mean).square().sum()))

    @classmethod
    def total(cls, parts: Iterable[RunningMoments]) -> RunningMoments:
        """Return the combined moments of all parts, such as the moments of all workers."""
        total = cls()
        for part in parts:
            total = total.merged(part)
        return total

    def merged(self, other: RunningMoments) -> RunningMoments:
        """Return the combined moments of both sets of scores."""
        count = self.count + other.count
        if count == 0.0:
            return self
        mean_gap = other.mean - self.mean
        return RunningMoments(
            count,
            self.mean + mean_gap * other.count / count,
            self.squared_deviation
            + other.squared_deviation
            + mean_gap * mean_gap * self.count * other.count / count,
        )

    @property
    def variance(self) -> float:
        """Population variance. It is 0 if there are no scores."""
        return self.squared_deviation / self.count if self.count else 0.0

    def normalize(self, scores: Tensor) -> Tensor:
        """Return scores [B] minus the mean, divided by the standard deviation (at least 1e-4)."""
        centred = (scores.double() - self.mean) / math.sqrt(max(self.variance, MIN_VARIANCE))
        return centred.to(scores.dtype)

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint: the arguments of the constructor."""
        return asdict(self)


def shape_scores(
    experience: Experience,
    section: ShapingSection,
    moments: RunningMoments,
    workers: Workers,
    *,
    max_new_tokens: int,
) -> tuple[Tensor, RunningMoments]:
    """Compute the scores to train on from raw scores, as `ppo.shaping` configures.

    All workers call it together. Responses whose scoring failed (NaN) or that have no sampled token
    are left out of the moments. A response without a sampled token gets the score 0.

    Args:
        experience: This worker's rows, with their raw scores.
        section: The section `ppo.shaping` of the config.
        moments: Moments of the scores of all earlier steps, before normalisation.
        workers: The workers that together hold all rows of the step.
        max_new_tokens: Longest allowed response, in tokens.

    Returns:
        scores: [B], NaN where scoring failed.
        moments: Moments that include this step's scores of all workers. Unchanged if
            `section.normalize` is off.
    """
    num_tokens = experience.response_mask.sum(1)
    scores, sampled = experience.scores, num_tokens > 0
    if section.function is not None:
        scores = custom_shaped_scores(
            section.function, experience, workers, max_new_tokens=max_new_tokens
        )
    shaped = keep(scores, sampled)
    buffer_tokens = section.overlong_tokens(max_new_tokens)
    if buffer_tokens is not None:
        shaped = overlong_penalty(
            shaped,
            num_tokens,
            max_tokens=max_new_tokens,
            buffer_tokens=buffer_tokens,
            factor=section.overlong_factor,
        )
    is_truncated = experience.truncated & ~shaped.isnan()  # a failed response stays failed
    if section.truncated_score is not None:
        shaped = torch.where(is_truncated, section.truncated_score, shaped)
    if section.truncated_scale is not None:  # abs lowers negative scores too
        scaled = shaped - (1.0 - section.truncated_scale) * shaped.abs()
        shaped = torch.where(is_truncated, scaled, shaped)
    if section.normalize:
        # The rows of an episode share its score, which counts once.
        own_moments = RunningMoments.of(shaped, sampled & experience.is_first_row)
        moments = moments.merged(RunningMoments.total(workers.gather(own_moments)))
        shaped = moments.normalize(shaped)
    if section.clip_low is not None or section.clip_high is not None:
        shaped = shaped.clamp(section.clip_low, section.clip_high)
    return keep(shaped, sampled), moments
