"""Input embeddings on GPUs, kept away from a CUDA kernel with a race.

The backward pass of torch's embedding takes a kernel of its own for few indices. It sums blocks of
1024 and misses a barrier between two of them, so that gradients are rarely wrong, without a word
(pytorch/pytorch#187687, mended in June 2026). One block has no successor, and many indices take
another kernel, which sorts them.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor

RACY_COUNTS = range(1025, 4097)
"""Indices of a lookup that may take the kernel: up to 3072, and 4096 where Hopper's own limit of
pytorch/pytorch#137237 is built in."""


def avoid_racy_counts(network: Any) -> None:
    """Let a Hugging Face model look up more tokens where their number could take that kernel.

    The first token is looked up again, as often as it takes. Those states are cut off, so their
    gradients are exact zeros, and the sums stay what they are.
    """
    embedding = network.get_input_embeddings()
    look_up = embedding.forward

    @wraps(look_up)
    def padded(ids: Tensor) -> Tensor:
        count = ids.numel()
        if count not in RACY_COUNTS:
            return look_up(ids)
        flat = ids.flatten()
        more = flat[:1].expand(RACY_COUNTS.stop - count)
        return look_up(torch.cat([flat, more]))[:count].unflatten(0, ids.shape)

    embedding.forward = padded
