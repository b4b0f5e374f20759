"""Tokens with high covariance of log-prob and advantage, whose update reduces entropy the most.

Notation: B responses, T response tokens. Every mask: True = keep.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from raypo.collectives import Workers
from raypo.ppo.kl import MIN_LOG_PROB
from raypo.ppo.masked import check_choice, check_same_shape, keep, masked_moments

COVARIANCE_KINDS = ("clip_cov", "kl_cov")


def covariant_tokens(
    log_probs: Tensor,  # [B, T], learner, before the update
    advantages: Tensor,  # [B, T]
    mask: Tensor,  # [B, T] bool
    identity: Tensor,  # [B, 3] int, group, sample and row of each response
    *,
    kind: str,
    fraction: float,
    low: float = 1.0,
    high: float = 5.0,
    seed: Sequence[int] = (),
    workers: Workers | None = None,
) -> Tensor:
    """Select the tokens of high covariance in a step. All workers call it together.

    A token's covariance is the product of its log-prob and advantage, each minus its mean over the
    sampled tokens of all workers.

    - clip_cov: random tokens whose covariance is between `low` and `high`.
    - kl_cov: the tokens of largest covariance.

    At most `fraction` of the sampled tokens are selected, but at least one if any is eligible.

    Args:
        log_probs: Log-probs of the learner before the update, in nats.
        advantages: Advantage of each token.
        mask: True on sampled tokens.
        identity: A unique key for each response, so that the selection does not depend on how
            responses are distributed over workers.
        kind: clip_cov or kl_cov.
        fraction: Largest share of sampled tokens to select.
        low: Lower bound of the covariance, for clip_cov.
        high: Upper bound of the covariance, for clip_cov.
        seed: Seed of the draw, for clip_cov.
        workers: The workers that hold the step. None means this process only.

    Returns:
        covariant: [B, T] bool, False where masked.

    Raises:
        ValueError: `kind` is unknown or the shapes differ.

    Paper: Cui et al. 2025, arXiv:2505.22617, section 4.2 (Clip-Cov, KL-Cov).
    """
    check_choice("kind", kind, COVARIANCE_KINDS)
    check_same_shape(log_probs=log_probs, advantages=advantages, mask=mask)
    workers, mask = workers or Workers(), mask.bool()
    kept = [keep(log_probs, mask).clamp(min=MIN_LOG_PROB), keep(advantages, mask)]
    moments = workers.sum(torch.stack([masked_moments(each, mask)[:2] for each in kept]))
    count = int(moments[0, 0])
    centred = [
        x.double() - total / max(count, 1) for x, (_, total) in zip(kept, moments, strict=True)
    ]
    products = centred[0] * centred[1]
    most = max(int(fraction * count), 1)
    eligible = mask & (products > low) & (products < high) if kind == "clip_cov" else mask
    rows, places = eligible.nonzero(as_tuple=True)
    size = products[rows, places]
    if kind == "kl_cov" and len(size) > most:  # smaller ones are not among the largest of all
        among = size >= size.topk(most).values.min()  # keep ties: the key decides between them
        size, rows, places = size[among], rows[among], places[among]
    names = torch.cat([identity[rows], places.unsqueeze(1)], 1)  # [n, 4]
    shares = workers.gather((size.cpu().numpy(), names.cpu().numpy()))
    sizes, everyone = (np.concatenate(column) for column in zip(*shares, strict=True))
    order = np.lexsort(everyone.T[::-1])  # by group, sample, row and place
    if kind == "clip_cov":
        order = order[np.random.default_rng(seed).permutation(len(order))]
    else:
        order = order[np.argsort(-sizes[order], kind="stable")]
    chosen = np.zeros(len(order), dtype=bool)
    chosen[order[:most]] = True
    first = sum(len(share[0]) for share in shares[: workers.rank])
    mine = torch.from_numpy(chosen[first : first + len(rows)]).to(rows.device)
    covariant = torch.zeros_like(mask)
    covariant[rows[mine], places[mine]] = True
    return covariant
