"""Selection of tokens with high covariance of log-prob and advantage.

Updates on these tokens reduce the entropy the most.

Notation: B responses, T response tokens. Every mask: True = keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.config import PPOSection
from raypo.ppo.kl import MIN_LOG_PROB
from raypo.ppo.masked import keep, masked_moments
from raypo.seeds import SeedWord
from raypo.types import Experience


def with_covariant_tokens(
    experience: Experience, ppo: PPOSection, workers: Workers, *, seed: int, step: int
) -> Experience:
    """Add `covariant` to the experience: a mask of the tokens that clip_cov or kl_cov restrict.

    With other policy losses the experience is returned unchanged.
    """
    if not ppo.needs_covariance:
        return experience
    seed_words = (SeedWord.COVARIANCE, seed, step)
    covariant = covariant_tokens(experience, ppo, workers, seed=seed_words)
    return experience.with_(covariant=covariant)


def covariant_tokens(
    experience: Experience, ppo: PPOSection, workers: Workers, *, seed: Sequence[int]
) -> Tensor:
    """Select the tokens with high covariance in a step. All workers call it together.

    A token's covariance is the product of its log-prob and its advantage. Each factor is
    centred by its mean over the tokens of all workers that count in the loss.

    - clip_cov: random tokens whose covariance is between `low` and `high`.
    - kl_cov: the tokens with the largest covariance.

    At most `fraction` of the tokens that count are selected, but at least one if any is eligible.
    The selection does not depend on how rows are distributed over workers.

    Args:
        experience: This worker's rows, with old log-probs, advantages, and the indices of group,
            sample and row.
        ppo: The section `ppo` of the config, with its `policy_loss` and `covariance`.
        workers: The workers that together hold all rows of the step.
        seed: Seed of the random selection, for clip_cov.

    Returns:
        covariant: [B, T] bool, False where masked.

    Paper: Cui et al. 2025, arXiv:2505.22617, section 4.2 (Clip-Cov, KL-Cov).
    """
    assert experience.old_log_probs is not None
    assert experience.advantages is not None
    assert experience.sample_index is not None
    assert experience.row_index is not None
    mask, section, is_random = experience.counted, ppo.covariance, ppo.policy_loss == "clip_cov"
    log_probs = keep(experience.old_log_probs, mask).clamp(min=MIN_LOG_PROB)
    factors = [log_probs, keep(experience.advantages, mask)]
    moments = workers.sum(torch.stack([masked_moments(tensor, mask)[:2] for tensor in factors]))
    count = int(moments[0, 0])
    centred = [
        factor.double() - total / max(count, 1)
        for factor, (_, total) in zip(factors, moments, strict=True)
    ]
    products = centred[0] * centred[1]
    max_tokens = max(int(section.fraction * count), 1)
    in_bounds = (products > section.low) & (products < section.high)
    eligible = mask & in_bounds if is_random else mask
    rows, columns = eligible.nonzero(as_tuple=True)
    covariances = products[rows, columns]
    if (
        not is_random and len(covariances) > max_tokens
    ):  # the other tokens cannot be among the largest of all workers
        is_candidate = (
            covariances >= covariances.topk(max_tokens).values.min()
        )  # keep ties: the order below decides
        covariances, rows, columns = (
            covariances[is_candidate],
            rows[is_candidate],
            columns[is_candidate],
        )
    indices = experience.group_index, experience.sample_index, experience.row_index
    token_ids = torch.stack([*(index[rows] for index in indices), columns], 1)  # [n, 4]
    gathered, own_rows = workers.gather_rows(covariances, token_ids)
    all_covariances, all_token_ids = (tensor.numpy() for tensor in gathered)
    order = np.lexsort(all_token_ids.T[::-1])  # by group, sample, row and position
    if is_random:
        order = order[np.random.default_rng(seed).permutation(len(order))]
    else:
        order = order[np.argsort(-all_covariances[order], kind="stable")]
    is_selected = np.zeros(len(order), dtype=bool)
    is_selected[order[:max_tokens]] = True
    own_selected = torch.from_numpy(is_selected[own_rows]).to(rows.device)
    covariant = torch.zeros_like(mask)
    covariant[rows[own_selected], columns[own_selected]] = True
    return covariant
