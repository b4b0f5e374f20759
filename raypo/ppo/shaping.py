"""Score shaping: from a response's raw score to the score that is trained on.

Notation: B responses. Every mask: True = keep. `shape_scores` applies the parts in a fixed order:
custom function, overlong penalty, truncation penalty, running normalisation, clip.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import ShapingSection
from raypo.ppo.custom_functions import shaped_by
from raypo.ppo.masked import MIN_VARIANCE, check_same_shape, keep
from raypo.types import Experience


def overlong_penalty(
    scores: Tensor,  # [B]
    num_tokens: Tensor,  # [B] int
    *,
    max_tokens: int,
    buffer_tokens: int,
    factor: float = 1.0,
) -> Tensor:
    """Subtract a penalty that grows over the last tokens before the length limit.

    Args:
        scores: Score of each response.
        num_tokens: Sampled tokens of each response.
        max_tokens: Longest response, in tokens.
        buffer_tokens: Number of tokens before the limit over which the penalty grows from 0 to
            `factor`.
        factor: Penalty at the limit.

    Returns:
        scores: [B].

    Raises:
        ValueError: the shapes differ, or not 0 < buffer_tokens <= max_tokens.

    Paper: Yu et al. 2025, arXiv:2503.14476, eq. 13 (soft overlong punishment).
    """
    check_same_shape(scores=scores, num_tokens=num_tokens)
    if not 0 < buffer_tokens <= max_tokens:
        raise ValueError(
            f"buffer_tokens ({buffer_tokens}) must lie between 1 and max_tokens ({max_tokens})."
        )
    excess = (num_tokens - (max_tokens - buffer_tokens)).clamp(min=0, max=buffer_tokens)
    return scores - factor * excess.to(scores.dtype) / buffer_tokens


def truncation_penalty(
    scores: Tensor,  # [B]
    truncated: Tensor,  # [B] bool, the response ran into the limit
    *,
    replacement: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """Replace the scores of truncated responses, or lower them by a share of their size.

    Args:
        scores: Score of each response.
        truncated: True for truncated responses.
        replacement: Score of every truncated response.
        scale: c in [0, 1] for score - (1 - c) * |score|, which never raises a negative score.

    Returns:
        scores: [B].

    Raises:
        ValueError: the shapes differ, both or neither are set, or `scale` is outside [0, 1].
    """
    check_same_shape(scores=scores, truncated=truncated)
    if (replacement is None) == (scale is None):
        raise ValueError(
            f"Set one of replacement ({replacement}) and scale ({scale}), not both or neither."
        )
    if replacement is not None:
        return torch.where(truncated, replacement, scores)
    if scale is None or not 0.0 <= scale <= 1.0:
        raise ValueError(f"scale ({scale}) must lie in [0, 1].")
    return torch.where(truncated, scores - (1.0 - scale) * scores.abs(), scores)


def clip_scores(
    scores: Tensor,  # [B]
    *,
    low: float | None = None,
    high: float | None = None,
) -> Tensor:
    """Clip scores to [low, high]. None means no bound on that side.

    Returns:
        scores: [B].

    Raises:
        ValueError: `low` is not below `high`.
    """
    low = -math.inf if low is None else low
    high = math.inf if high is None else high
    if low >= high:
        raise ValueError(f"low ({low}) must be below high ({high}).")
    return scores.clamp(low, high)


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
        """Return the moments of scores [B] that are valid [B] and not NaN. None means all valid."""
        valid = ~scores.isnan() if valid is None else valid.bool() & ~scores.isnan()
        exact = scores[valid].double()
        if exact.numel() == 0:
            return cls()
        mean = exact.mean()
        return cls(float(exact.numel()), float(mean), float((exact - mean).square().sum()))

    @classmethod
    def total(cls, parts: Iterable[RunningMoments]) -> RunningMoments:
        """Return the moments of all parts together, such as those of all workers."""
        whole = cls()
        for part in parts:
            whole = whole.merged(part)
        return whole

    def merged(self, other: RunningMoments) -> RunningMoments:
        """Return the moments of both together."""
        count = self.count + other.count
        if count == 0.0:
            return self
        gap = other.mean - self.mean
        return RunningMoments(
            count,
            self.mean + gap * other.count / count,
            self.squared_deviation
            + other.squared_deviation
            + gap * gap * self.count * other.count / count,
        )

    @property
    def variance(self) -> float:
        """Population variance; 0 without scores."""
        return self.squared_deviation / self.count if self.count else 0.0

    def normalize(self, scores: Tensor) -> Tensor:
        """Return scores [B] minus the mean, over the standard deviation (at least 1e-4)."""
        centred = (scores.double() - self.mean) / math.sqrt(max(self.variance, MIN_VARIANCE))
        return centred.to(scores.dtype)

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint: the arguments of the constructor."""
        return asdict(self)


def shape_scores(
    experience: Experience,
    section: ShapingSection,
    seen: RunningMoments,
    workers: Workers,
    *,
    max_new_tokens: int,
) -> tuple[Tensor, RunningMoments]:
    """Apply a custom function, overlong penalty, truncation penalty, normalisation and clip.

    All workers call it together. Responses that failed (NaN) or have no sampled token are left out
    of the moments. A response without a sampled token gets 0.

    Args:
        experience: This worker's rows, with their raw scores.
        section: The section `ppo.shaping` of the config.
        seen: Moments of the scores of all earlier steps, before normalisation.
        workers: The workers that hold the whole step together.
        max_new_tokens: Longest response, in tokens.

    Returns:
        scores: [B], NaN where scoring failed.
        seen: Moments with this step's scores of all workers; unchanged unless `section.normalize`.
    """
    num_tokens = experience.response_mask.sum(1)
    scores, sampled = experience.scores, num_tokens > 0
    if section.function is not None:
        scores = shaped_by(section.function, experience, workers, max_new_tokens=max_new_tokens)
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
    if section.truncated_score is not None or section.truncated_scale is not None:
        # A failed response stays failed, truncated or not.
        shaped = truncation_penalty(
            shaped,
            experience.truncated & ~shaped.isnan(),
            replacement=section.truncated_score,
            scale=section.truncated_scale,
        )
    if section.normalize:
        # The rows of an episode share its score, which counts once.
        mine = RunningMoments.of(shaped, sampled & experience.is_first_row)
        seen = seen.merged(RunningMoments.total(workers.gather(mine)))
        shaped = seen.normalize(shaped)
    if section.clip_low is not None or section.clip_high is not None:
        shaped = clip_scores(shaped, low=section.clip_low, high=section.clip_high)
    return keep(shaped, sampled), seen
