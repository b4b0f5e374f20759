"""Functions of groups of samples: the filter of dynamic sampling, and pass@k.

Notation: P prompts, n samples per prompt. Every mask: True = keep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raypo.config import FilterSection
from raypo.ppo.masked import check_same_shape, keep


def filter_groups(
    scores: Tensor,  # [P, n]
    valid: Tensor,  # [P, n] bool
    section: FilterSection,
) -> Tensor:
    """Select the groups to train on: scores differ within the group, and their mean is in range.

    Args:
        scores: Score of each sample.
        valid: False leaves a sample out: it failed, or has no sampled token.
        section: The section `ppo.filter` of the config. `min_std` bounds the population standard
            deviation.

    Returns:
        kept: [P] bool; False for a group with fewer than two valid samples.

    Paper: Yu et al. 2025, arXiv:2503.14476, eq. 11 (dynamic sampling).
    """
    check_same_shape(scores=scores, valid=valid)
    exact = keep(scores, valid).double()
    count = valid.sum(1).clamp(min=1)  # [P]
    mean = exact.sum(1) / count
    spread = keep(exact - mean.unsqueeze(1), valid)
    std = (spread.square().sum(1) / count).sqrt()
    # Compare scores for equality: equal ones may deviate from their mean by rounding.
    differ = exact.masked_fill(~valid, torch.inf).amin(1) < exact.masked_fill(
        ~valid, -torch.inf
    ).amax(1)
    kept = differ & (std > section.min_std)
    if section.low is not None:
        kept = kept & (mean > section.low)
    if section.high is not None:
        kept = kept & (mean < section.high)
    return kept


def pass_at_k(
    num_correct: Tensor,  # [P] int
    num_samples: Tensor,  # [P] int
    *,
    k: int,
) -> Tensor:
    """Estimate the probability that one of k samples is correct: 1 - C(n - c, k) / C(n, k).

    Args:
        num_correct: Correct samples c of each prompt.
        num_samples: Samples n of each prompt.
        k: Number of samples that are drawn.

    Returns:
        pass_at_k: [P] float64, unbiased for each prompt. Average it over a data source.

    Raises:
        ValueError: not 1 <= k <= num_samples, or not 0 <= num_correct <= num_samples.

    Paper: Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    check_same_shape(num_correct=num_correct, num_samples=num_samples)
    if num_samples.numel() == 0:
        return torch.zeros(num_samples.shape, dtype=torch.float64)
    least = int(num_samples.min())
    if not 1 <= k <= least:
        raise ValueError(
            f"k ({k}) must lie between 1 and the samples a prompt ({least}). "
            "Draw more samples or lower k."
        )
    if bool(((num_correct < 0) | (num_correct > num_samples)).any()):
        raise ValueError("num_correct must lie between 0 and num_samples.")
    # C(n - c, k) / C(n, k) = product over i < k of (n - c - i) / (n - i): no huge numbers.
    steps = torch.arange(k, device=num_samples.device)
    total = num_samples.unsqueeze(1) - steps  # [P, k]
    wrong = (total - num_correct.unsqueeze(1)).clamp(min=0)  # [P, k]
    return 1.0 - (wrong.double() / total.double()).prod(1)
