"""Rollout correction: importance weights for the mismatch between engine and learner.

Notation: B responses, T response tokens. Every mask: True = keep.
w = exp(old_log_probs - rollout_log_probs) is a token's probability under the learner before the
update, divided by its probability under the engine that sampled it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import CorrectionSection, PPOSection
from raypo.metrics.reduce import WeightedMeans
from raypo.ppo.kl import k3, log_ratio
from raypo.ppo.masked import check_same_shape, exact_sum, masked_sum
from raypo.types import Experience

DEFAULT_CAPS = {"tis": 2.0, "sequence_tis": 2.0, "geometric_tis": 1.001, "mis": 2.0}
"""Default cap of the weights, by kind."""
DEFAULT_MASKS = {"icepop": (0.5, 5.0), "geometric": (0.999, 1.001), "product": (0.5, 2.0)}
"""Default bounds of the ratios whose tokens keep their weight. `icepop` bounds the ratio of each
token. `geometric` and `product` (`mask_ratio`) are for mis, which bounds the ratio of each
response: the geometric mean or the product of its tokens' ratios."""
MAX_LAG = 8
"""Largest staleness, in weight versions, with separate metrics. Older tokens count as having it."""


def with_corrections(
    experience: Experience, section: CorrectionSection, *, version: int
) -> Experience:
    """Add the importance `weights` of the rollout correction, if it is on.

    Args:
        experience: This worker's rows.
        section: The section `ppo.correction` of the config.
        version: Version of the weights that the update starts from.
    """
    if not section.acts and section.max_staleness is None:
        return experience
    return experience.with_(weights=_weights(experience, section, version)[0])


def mismatch_metrics(
    experience: Experience, ppo: PPOSection, workers: Workers, *, version: int
) -> dict[str, float]:
    """Return metrics of the engine-learner mismatch, of the corrections, and of staleness.

    With `ppo.old_log_probs: engine` the learner computes no log-probs before the update, so the KL
    and the gap between engine and learner are not reported. If any token is stale, the mismatch and
    the share of tokens are also reported for each staleness up to `MAX_LAG`.

    Args:
        experience: This worker's rows, with old log-probs.
        ppo: The section `ppo` of the config.
        workers: The workers that together hold all rows of the step.
        version: Version of the learner's weights. A token is stale if an older version sampled it.
    """
    assert experience.old_log_probs is not None
    log_probs = experience.old_log_probs, experience.rollout_log_probs
    mask = experience.response_mask
    weights, clipped = _weights(experience, ppo.correction, version)
    means = WeightedMeans()
    stats = mismatch_statistics(*log_probs, mask, clipped)
    has_gap = ppo.old_log_probs == "learner"
    if has_gap:
        _add_mismatch(means, stats, suffix="")
    means.total("mismatch/unknown_tokens", stats["unknown"])
    means.add("mismatch/weight_mean", masked_sum(weights, mask), stats["tokens"])
    means.add("mismatch/dropped_fraction", (mask & (weights == 0.0)).sum(), stats["tokens"])
    lag = experience.staleness(version)  # [B, T]
    sampled = lag[mask]
    response_lag = torch.where(mask, lag, 0).sum(1) / mask.sum(1).clamp(min=1)  # [B]
    means.add("rollout/staleness_mean", response_lag.double().sum(), len(lag))
    if len(sampled):
        means.maximum("rollout/staleness_max", sampled.max())
    # All workers must add the same metrics, so the longest lag is taken over all workers.
    max_lag = int(workers.max(torch.cat([sampled, lag.new_zeros(1)]).max()))
    for lag_value in range(min(max_lag, MAX_LAG) + 1 if max_lag > 0 else 0):
        lagging = mask & (lag.clamp(max=MAX_LAG) == lag_value)
        stats = mismatch_statistics(*log_probs, lagging, clipped)
        if has_gap:
            _add_mismatch(means, stats, suffix=f"_lag_{lag_value}")
        means.add(f"rollout/staleness_share_{lag_value}", stats["tokens"], len(sampled))
    return means.reduce(workers)


def _weights(
    experience: Experience, section: CorrectionSection, version: int
) -> tuple[Tensor, Tensor]:
    """Return the weights and the mask of `bounded_weights`, after applying `max_staleness`.

    A token that is staler than `max_staleness` gets weight 0 and counts as clipped.
    """
    mask, old_log_probs = experience.response_mask, experience.old_log_probs
    assert old_log_probs is not None or not section.acts
    rollout_log_probs = experience.rollout_log_probs
    weights, clipped = bounded_weights(
        rollout_log_probs if old_log_probs is None else old_log_probs,
        rollout_log_probs,
        mask,
        section,
    )
    if section.max_staleness is None:
        return weights, clipped
    is_stale = mask & (experience.staleness(version) > section.max_staleness)
    return torch.where(is_stale, 0.0, weights), clipped | is_stale


def _add_mismatch(means: WeightedMeans, stats: dict[str, Tensor], *, suffix: str) -> None:
    tokens = stats["tokens"]
    means.add(f"mismatch/kl{suffix}", stats["kl"], tokens)
    means.add(f"mismatch/log_prob_gap_mean{suffix}", stats["abs_difference"], tokens)
    means.maximum(f"mismatch/log_prob_gap_max{suffix}", stats["abs_difference_max"])
    means.add(f"mismatch/clip_fraction{suffix}", stats["clipped"], tokens)


def bounded_weights(
    old_log_probs: Tensor,  # [B, T], learner, before the update
    rollout_log_probs: Tensor,  # [B, T], as the engine reported them
    mask: Tensor,  # [B, T] bool
    section: CorrectionSection,
) -> tuple[Tensor, Tensor]:
    """Return the bounded, detached weights of the token losses, and a mask of the bounded tokens.

    - none: 1.
    - tis: min(w, cap).
    - sequence_tis: min(product of w over the response, cap).
    - geometric_tis: min(geometric mean of w over the response, cap).
    - icepop: w if it is inside [low, high], else 0.
    - mis: as tis, but 0 for a whole response whose ratio is outside [low, high].

    With `token_veto` and any kind, a whole response gets weight 0 if one of its tokens has a
    smaller w. Tokens with weight 0 stay in the loss's denominator.

    Args:
        old_log_probs: Log-probs of the learner before the update, in nats.
        rollout_log_probs: Log-probs that the engine reported.
        mask: True on sampled tokens.
        section: The section `ppo.correction` of the config. None for a bound means its default in
            `DEFAULT_CAPS` or `DEFAULT_MASKS`.

    Returns:
        weights: [B, T], 0 where masked. A token with a NaN log-prob gets weight 0, except for the
            kind none. For kinds that use the response's ratio, all tokens of that response then get
            weight 0.
        clipped: [B, T] bool, sampled tokens whose weight was cut to `cap` or dropped.

    Raises:
        ValueError: the shapes differ.

    Paper: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
        (tis); Liu et al. 2025, "When Speed Kills Stability" (sequence_tis, mis by the product,
        token veto); Li and Liu 2025, "Trust Region Optimization via Sequence Masking" (mis by the
        geometric mean); Zheng et al. 2025, arXiv:2507.18071, eq. 7 (geometric mean as a weight);
        Ling Team 2025, arXiv:2510.18855 (icepop).
    """
    kind, mask_ratio = section.kind, section.mask_ratio
    with torch.no_grad():
        token_log_ratio = log_ratio(old_log_probs, rollout_log_probs, mask)
        product = token_log_ratio.sum(1, keepdim=True)  # [B, 1]
        mean = product / mask.sum(1, keepdim=True).clamp(min=1)
        # A ratio beyond the range of floats becomes infinite or 0, which is outside all bounds.
        ratio = {
            "none": torch.zeros_like(token_log_ratio),
            "sequence_tis": product,
            "geometric_tis": mean,
        }.get(kind, token_log_ratio).exp()
        weights, is_kept = ratio, mask & ~ratio.isnan()
        if kind in DEFAULT_CAPS:
            weights = ratio.clamp(max=DEFAULT_CAPS[kind] if section.cap is None else section.cap)
        if kind in ("icepop", "mis"):
            response_log_ratio = mean if mask_ratio == "geometric" else product
            bounded_ratio = ratio if kind == "icepop" else response_log_ratio.exp()
            low, high = DEFAULT_MASKS[mask_ratio if kind == "mis" else kind]
            low = low if section.low is None else section.low
            high = high if section.high is None else section.high
            is_kept = is_kept & (bounded_ratio >= low) & (bounded_ratio <= high)
        if section.token_veto is not None:
            is_kept = is_kept & (token_log_ratio.exp() >= section.token_veto).all(1, keepdim=True)
        # Select instead of multiplying: dropped weights may be infinite or NaN.
        weights = torch.where(is_kept, weights, 0.0)
        return weights, mask & (weights != ratio)


def off_policy_tokens(
    log_probs: Tensor,  # [B, T], current policy
    rollout_log_probs: Tensor,  # [B, T], as the engine reported them
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    threshold: float,
) -> Tensor:
    """Select the tokens that off-policy sequence masking excludes from the surrogate.

    The surrogate of token t of response i is multiplied by M[i, t], which is 0 if A[i, t] < 0 and
    mean over t of (rollout_log_probs[i, t] - log_probs[i, t]) > threshold, else 1. A response that
    the policy has become unlikely to sample is not made even less likely. The tokens stay in the
    denominator of the loss, and in all its other terms.

    A row with an unknown log-prob (NaN) counts as off-policy, unless `ppo.old_log_probs: engine`
    has left the token out. Each row of an episode counts as a response.

    Returns:
        off_policy: [B, T] bool, False where masked.

    Raises:
        ValueError: the shapes differ.

    Paper: DeepSeek-AI 2025 (DeepSeek-V3.2), arXiv:2512.02556, section 3.1, eq. 8 and 9.
    """
    ratio = log_ratio(rollout_log_probs, log_probs.detach(), mask)
    mean = ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return mask & (advantages < 0.0) & ~(mean <= threshold)


def mismatch_statistics(
    old_log_probs: Tensor,  # [B, T]
    rollout_log_probs: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    clipped: Tensor,  # [B, T] bool
) -> dict[str, Tensor]:
    """Return statistics of the mismatch between learner and engine on the sampled tokens.

    Args:
        old_log_probs: Log-probs of the learner before the update, in nats.
        rollout_log_probs: Log-probs that the engine reported.
        mask: True on sampled tokens.
        clipped: Mask from `bounded_weights`.

    Returns:
        stats: float64 scalars. All are sums, to add over micro-batches and workers, except
            `abs_difference_max`, which is a maximum over tokens.

            - `tokens`: number of tokens.
            - `abs_difference`, `abs_difference_max`: difference of log-probs, in nats.
            - `kl`: k3 estimate of KL(rollout || old), in nats.
            - `clipped`: number of tokens in the mask `clipped`.
            - `unknown`: number of tokens with a NaN log-prob. They also count in `tokens` and
              `clipped`, but their difference is taken as 0.

    Raises:
        ValueError: the shapes differ.

    Paper: Schulman 2020, "Approximating KL Divergence" (blog).
    """
    with torch.no_grad():
        difference = log_ratio(old_log_probs, rollout_log_probs, mask)
        unknown = difference.isnan()
        difference = torch.where(unknown, 0.0, difference)
        zero = torch.zeros((), dtype=torch.float64, device=difference.device)
        check_same_shape(clipped=clipped, mask=mask)
        return {
            "tokens": mask.sum().double(),
            "abs_difference": exact_sum(difference.abs()),
            "abs_difference_max": difference.abs().amax().double() if mask.numel() else zero,
            "kl": exact_sum(k3(-difference)),
            "clipped": (clipped & mask).sum().double(),
            "unknown": unknown.sum().double(),
        }
