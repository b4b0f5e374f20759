"""Selection of the tokens at which the policy is least certain.

Notation: B responses, T response tokens. Every mask: True = keep.
"""

from __future__ import annotations

import torch

from raypo.collectives import Workers
from raypo.config import PPOSection
from raypo.types import Experience


def with_high_entropy_tokens(
    experience: Experience, ppo: PPOSection, workers: Workers
) -> tuple[Experience, dict[str, float]]:
    """Add `high_entropy` to the experience: a mask of the tokens that keep their policy gradient.

    All workers call it together. These are the tokens of entropy H >= tau, where tau is the
    k-th largest entropy of the n tokens that count in the loss, on all workers, and k is
    `ppo.top_entropy_fraction` * n, rounded down, but at least 1. Equal entropies are selected
    together, so that the selection does not depend on how rows are distributed over workers. The
    surrogate is multiplied by 1[H >= tau] and, as in the paper, still divided by the number of all
    tokens. (The authors' code divides by the number of selected tokens.)

    The entropies are those before the step's updates, so that all of its microbatches, minibatches
    and epochs share one threshold.

    Args:
        experience: This worker's rows, with the policy's entropies.
        ppo: The section `ppo` of the config.
        workers: The workers that together hold all rows of the step.

    Returns:
        experience: The experience with `high_entropy`. It is unchanged if the fraction is 1.
        metrics: `ppo/entropy_threshold`, tau in nats, if there is a selection.

    Paper: Wang et al. 2025, "Beyond the 80/20 Rule", arXiv:2506.01939, section 5.1.
    """
    if not ppo.needs_entropy:
        return experience, {}
    assert experience.entropy is not None
    mask, entropy = experience.counted, experience.entropy
    count = int(workers.sum(mask.sum()))
    num_selected = max(int(ppo.top_entropy_fraction * count), 1)
    entropies = entropy[mask]
    # A worker's other tokens cannot be among the largest of all workers.
    (candidates,), _ = workers.gather_rows(entropies.topk(min(num_selected, len(entropies))).values)
    if not count:
        return experience.with_(high_entropy=torch.zeros_like(mask)), {}
    threshold = candidates.topk(num_selected).values[-1].to(entropy)
    selected = experience.with_(high_entropy=mask & (entropy >= threshold))
    return selected, {"ppo/entropy_threshold": float(threshold)}
