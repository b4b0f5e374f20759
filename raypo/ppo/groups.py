"""Groups of samples: the filter of dynamic sampling, baselines, and pass@k.

Notation: B rows, P prompts, n samples per prompt. Every mask: True = keep.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import FilterSection
from raypo.ppo.advantages import GROUP_STD_EPS, group_baseline
from raypo.ppo.masked import check_same_shape, keep


def filter_groups(
    scores: Tensor,  # [P, n]
    valid: Tensor,  # [P, n] bool
    section: FilterSection,
) -> Tensor:
    """Select the groups to train on: groups with different scores and a mean score in range.

    Args:
        scores: Score of each sample.
        valid: False excludes a sample, because it failed or has no sampled token.
        section: The section `ppo.filter` of the config. `min_std` bounds the population standard
            deviation.

    Returns:
        selected: [P] bool; False for a group with fewer than two valid samples.

    Paper: Yu et al. 2025, arXiv:2503.14476, eq. 11 (dynamic sampling).
    """
    check_same_shape(scores=scores, valid=valid)
    exact = keep(scores, valid).double()
    count = valid.sum(1).clamp(min=1)  # [P]
    mean = exact.sum(1) / count
    deviation = keep(exact - mean.unsqueeze(1), valid)
    std = (deviation.square().sum(1) / count).sqrt()
    # Compare scores for equality: by rounding, equal scores may deviate from their mean.
    scores_differ = exact.masked_fill(~valid, torch.inf).amin(1) < exact.masked_fill(
        ~valid, -torch.inf
    ).amax(1)
    is_selected = scores_differ & (std > section.min_std)
    if section.low is not None:
        is_selected = is_selected & (mean > section.low)
    if section.high is not None:
        is_selected = is_selected & (mean < section.high)
    return is_selected


def baseline_over_workers(
    scores: Tensor,  # [B]
    group_index: Tensor,  # [B] int
    valid: Tensor,  # [B] bool
    *,
    kind: str,
    workers: Workers,
    sample_index: Tensor | None = None,  # [B] int
    lengths: Tensor | None = None,  # [B] int
    pass_k: int = 1,
) -> Tensor:
    """Compute `group_baseline` for groups whose samples are spread over rows and workers.

    All workers call it together.

    Args:
        scores: Score of each row of this worker.
        group_index: Rows with the same index, on any worker, are samples of one prompt.
        valid: False excludes a row.
        kind: Name of the estimator.
        workers: The workers that hold the groups.
        sample_index: Rows of a group with the same index are one sample, which counts once. They
            must have the same score. None means that each row is a sample.
        lengths: Sampled tokens of each row, for opo.
        pass_k: Number of samples k, for pass_at_k.

    Returns:
        advantages: [B] for this worker's rows, 0 where not valid.

    Raises:
        ValueError: the shapes differ.
    """
    check_same_shape(scores=scores, group_index=group_index, valid=valid)
    optional = {"sample_index": sample_index, "lengths": lengths}
    columns = {name: column for name, column in optional.items() if column is not None}
    gathered, own_rows = workers.gather_rows(scores, group_index, valid, *columns.values())
    optional_columns = dict(zip(columns, gathered[3:], strict=True))
    advantages = baseline_by_index(*gathered[:3], kind=kind, pass_k=pass_k, **optional_columns)[
        own_rows
    ]
    return advantages.to(scores.device)


def parts_over_workers(
    parts: Tensor,  # [B, K]
    group_index: Tensor,  # [B] int
    valid: Tensor,  # [B] bool
    *,
    weights: Mapping[str, float],
    workers: Workers,
    sample_index: Tensor | None = None,  # [B] int
) -> Tensor:
    """Compare each part of the score within its group, and normalise the weighted sum (GDPO).

    Each part is turned into the advantages of `grpo`, so a part with a wide range of values does
    not dominate the sum. The weighted sum of these advantages is normalised to mean 0 and unbiased
    standard deviation 1 over the samples of the step. A sample that lacks a part does not count in
    that part's mean and deviation, and the part adds 0 to the sample's sum. All workers call this
    function together.

    Args:
        parts: Parts of the score of each row of this worker, NaN for a part that a row lacks.
        group_index: Rows with the same index, on any worker, are samples of one prompt.
        valid: False excludes a row.
        weights: Weight of each part by its name, in the order of the columns.
        workers: The workers that hold the groups.
        sample_index: See `baseline_over_workers`.

    Returns:
        advantages: [B], 0 for rows that are not valid. They are all 0 if the weighted sum is the
            same for all samples, for example because no part differs within any group.

    Raises:
        ValueError: the shapes differ, or no valid sample of the step has a part of some name.

    Paper: Liu et al. 2026 (GDPO), arXiv:2601.05242.
    """
    check_same_shape(group_index=group_index, valid=valid)
    samples = [] if sample_index is None else [sample_index]
    gathered, own_rows = workers.gather_rows(parts.double(), group_index, valid, *samples)
    all_parts, group, is_valid = gathered[:3]
    if len(group) == 0:
        return parts.new_zeros(0)
    sample = gathered[3] if samples else torch.arange(len(group))
    total = all_parts.new_zeros(len(group))
    for column, (name, weight) in enumerate(weights.items()):
        has_part = is_valid & ~all_parts[:, column].isnan()
        if is_valid.any() and not has_part.any():
            raise ValueError(
                f"ppo.part_weights.{name} ({weight:g}): no response of this step has a part with "
                "this name. Use a name that the reward function returns next to `score` (a metric "
                "reward/NAME), or the name of a source of the score, such as model."
            )
        part = keep(all_parts[:, column], has_part)
        total += weight * baseline_by_index(part, group, has_part, sample, kind="grpo")
    first_rows, _ = _first_rows(group, sample, is_valid)
    valid_totals = total[first_rows][is_valid[first_rows]]
    # Compare for equality: by rounding, the deviation of equal numbers may be above 0.
    if len(valid_totals) < 2 or valid_totals.min() == valid_totals.max():
        return parts.new_zeros(len(parts))
    scaled = (total - valid_totals.mean()) / (valid_totals.std() + GROUP_STD_EPS)
    return keep(scaled, is_valid)[own_rows].to(parts)


def baseline_by_index(
    scores: Tensor,  # [B]
    group_index: Tensor,  # [B] int
    valid: Tensor,  # [B] bool
    sample_index: Tensor | None = None,  # [B] int
    *,
    kind: str,
    lengths: Tensor | None = None,  # [B] int
    pass_k: int = 1,
) -> Tensor:
    """Compute `group_baseline` for a flat batch in any order. Groups may differ in size.

    Args:
        scores: Score of each row.
        group_index: Rows with the same index are one group.
        valid: False excludes a row.
        sample_index: Rows of a group with the same index are one sample. None means that each row
            is a sample.
        kind: Name of the estimator.
        lengths: Number of sampled tokens of each row, for opo. A sample's length is the sum over
            its valid rows.
        pass_k: Number of samples k, for pass_at_k.

    Returns:
        advantages: [B], 0 for rows that are not valid, and in groups with fewer than two valid
            samples.

    Raises:
        ValueError: the shapes differ, or `kind` is unknown.
    """
    check_same_shape(scores=scores, group_index=group_index, valid=valid)
    if len(scores) == 0:
        return scores
    if sample_index is not None:
        first_rows, sample = _first_rows(group_index, sample_index, valid)
        if len(first_rows) < len(scores):
            sample_columns = scores[first_rows], group_index[first_rows], valid[first_rows]
            if lengths is not None:
                total = lengths.new_zeros(len(first_rows))
                lengths = total.index_add(0, sample, torch.where(valid, lengths, 0))
            advantages = baseline_by_index(
                *sample_columns, kind=kind, lengths=lengths, pass_k=pass_k
            )
            return keep(advantages[sample], valid)
    _, group, sizes = group_index.unique(return_inverse=True, return_counts=True)
    order = group.argsort(stable=True)
    starts = sizes.cumsum(0) - sizes  # [P]
    position = torch.empty_like(group)  # position of each row within its group
    position[order] = torch.arange(len(group), device=group.device) - starts[group[order]]
    shape = (len(sizes), max(int(sizes.max()), 2))

    def table(rows: Tensor) -> Tensor:
        return rows.new_zeros(shape).index_put_((group, position), rows)

    advantages = group_baseline(
        table(scores),
        kind=kind,
        valid=table(valid),
        lengths=None if lengths is None else table(lengths),
        pass_k=pass_k,
    )
    return advantages[group, position]


def _first_rows(group_index: Tensor, sample_index: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first valid row of each sample, [S] int64, and the sample of each row, [B] int64.

    For a sample without a valid row, its first row is returned.
    """
    pairs = torch.stack([group_index, sample_index])
    samples, sample = pairs.unique(dim=1, return_inverse=True)
    # Invalid rows get higher numbers than all valid rows, so the minimum prefers valid rows.
    rows = torch.arange(len(valid)) + len(valid) * ~valid
    first_rows = rows.new_full((samples.shape[1],), 2 * len(valid))
    return first_rows.scatter_reduce(0, sample, rows, "amin") % len(valid), sample


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
        k: Number of drawn samples.

    Returns:
        pass_at_k: [P] float64, unbiased for each prompt. Average it over prompts.

    Raises:
        ValueError: not 1 <= k <= num_samples, or not 0 <= num_correct <= num_samples.

    Paper: Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    check_same_shape(num_correct=num_correct, num_samples=num_samples)
    if num_samples.numel() == 0:
        return torch.zeros(num_samples.shape, dtype=torch.float64)
    min_samples = int(num_samples.min())
    if not 1 <= k <= min_samples:
        raise ValueError(
            f"k ({k}) must lie between 1 and the samples per prompt ({min_samples}). Draw more "
            "samples or lower k."
        )
    if bool(((num_correct < 0) | (num_correct > num_samples)).any()):
        raise ValueError("num_correct must lie between 0 and num_samples.")
    # C(n - c, k) / C(n, k) = product over i < k of (n - c - i) / (n - i): no huge numbers.
    draws = torch.arange(k, device=num_samples.device)
    remaining = num_samples.unsqueeze(1) - draws  # [P, k]
    remaining_wrong = (remaining - num_correct.unsqueeze(1)).clamp(min=0)  # [P, k]
    return 1.0 - (remaining_wrong.double() / remaining.double()).prod(1)
