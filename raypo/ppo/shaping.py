"""Score shaping: from a response's raw score to the score that is trained on.

Notation: B responses. Every mask: True = keep. `shape_scores` applies the parts in a fixed order:
overlong penalty, truncation penalty, running normalisation, clip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from raypo.ppo.masked import MIN_VARIANCE, check_same_shape, keep


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


@dataclass(frozen=True, kw_only=True)
class ShapingRules:
    """Settings of the parts of `shape_scores`. By default none is applied."""

    max_new_tokens: int
    overlong_buffer_tokens: int | None = None
    overlong_factor: float = 1.0
    truncated_score: float | None = None
    truncated_scale: float | None = None
    normalize: bool = False
    clip_low: float | None = None
    clip_high: float | None = None


def shape_scores(
    scores: Tensor,  # [B], NaN where scoring failed
    num_tokens: Tensor,  # [B] int, sampled tokens
    truncated: Tensor,  # [B] bool
    rules: ShapingRules,
    *,
    counted: Tensor | None = None,  # [B] bool
    seen: RunningMoments,
    gather: Callable[[RunningMoments], list[RunningMoments]],
) -> tuple[Tensor, RunningMoments]:
    """Apply overlong penalty, truncation penalty, running normalisation and clip, in this order.

    Responses that failed (NaN) or have no sampled token are left out of the moments. A response
    without a sampled token gets 0.

    Args:
        scores: Raw score of each row.
        num_tokens: Sampled tokens of each row.
        truncated: True for truncated responses.
        rules: The parts to apply.
        counted: Rows that count for the moments: one of each sample. None means all.
        seen: Moments of the scores of all earlier steps, before normalisation.
        gather: `Workers.gather`: returns every worker's value, in the order of ranks.

    Returns:
        scores: [B], NaN where scoring failed.
        seen: Moments with this step's scores of all workers; unchanged unless `rules.normalize`.

    Raises:
        ValueError: the shapes differ, or a rule is out of range.
    """
    sampled = num_tokens > 0
    shaped = keep(scores, sampled)
    if rules.overlong_buffer_tokens is not None:
        shaped = overlong_penalty(
            shaped,
            num_tokens,
            max_tokens=rules.max_new_tokens,
            buffer_tokens=rules.overlong_buffer_tokens,
            factor=rules.overlong_factor,
        )
    if rules.truncated_score is not None or rules.truncated_scale is not None:
        # A failed response stays failed, truncated or not.
        shaped = truncation_penalty(
            shaped,
            truncated & ~shaped.isnan(),
            replacement=rules.truncated_score,
            scale=rules.truncated_scale,
        )
    if rules.normalize:
        counted = sampled if counted is None else sampled & counted
        seen = seen.merged(RunningMoments.total(gather(RunningMoments.of(shaped, counted))))
        shaped = seen.normalize(shaped)
    if rules.clip_low is not None or rules.clip_high is not None:
        shaped = clip_scores(shaped, low=rules.clip_low, high=rules.clip_high)
    return keep(shaped, sampled), seen
