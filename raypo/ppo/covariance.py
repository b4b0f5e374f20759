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
    words = (SeedWord.COVARIANCE, seed, step)
    chosen = covariant_tokens(experience, ppo, workers, seed=words)
    return experience.with_(covariant=chosen)


def covariant_tokens(
    experience: Experience, ppo: PPOSection, workers: Workers, *, seed: Sequence[int]
) -> Tensor:
    """Select the tokens of high covariance in a step. All workers call it together.

    A token's covariance is the product of its log-prob and its advantage. The mean over all tokens
    that count in the loss, on all workers, is first subtracted from each of the two factors.

    - clip_cov: random tokens whose covariance is between `low` and `high`.
    - kl_cov: the tokens of largest covariance.

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
    mask, section, is_drawn = experience.counted, ppo.covariance, ppo.policy_loss == "clip_cov"
    log_probs = keep(experience.old_log_probs, mask).clamp(min=MIN_LOG_PROB)
    factors = [log_probs, keep(experience.advantages, mask)]
    moments = workers.sum(torch.stack([masked_moments(tensor, mask)[:2] for tensor in factors]))
    count = int(moments[0, 0])
    centred = [
        x.double() - total / max(count, 1) for x, (_, total) in zip(factors, moments, strict=True)
    ]
    products = centred[0] * centred[1]
    most = max(int(section.fraction * count), 1)
    within = (products > section.low) & (products < section.high)
    eligible = mask & within if is_drawn else mask
    rows, columns = eligible.nonzero(as_tuple=True)
    size = products[rows, columns]
    if not is_drawn and len(size) > most:  # the rest cannot be among the largest of all workers
        among = size >= size.topk(most).values.min()  # keep ties: the order below decides
        size, rows, columns = size[among], rows[among], columns[among]
    identity = experience.group_index, experience.sample_index, experience.row_index
    names = torch.stack([*(index[rows] for index in identity), columns], 1)  # [n, 4]
    gathered, own = workers.gather_rows(size, names)
    sizes, everyone = (tensor.numpy() for tensor in gathered)
    order = np.lexsort(everyone.T[::-1])  # by group, sample, row and place
    if is_drawn:
        order = order[np.random.default_rng(seed).permutation(len(order))]
    else:
        order = order[np.argsort(-sizes[order], kind="stable")]
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order[:most]] = True
    mine = torch.from_numpy(chosen[own]).to(rows.device)
    covariant = torch.zeros_like(mask)
    covariant[rows[mine], columns[mine]] = True
    return covariant
