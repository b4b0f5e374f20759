"""Workaround for a race in the CUDA backward pass of torch's embedding.

For few indices torch uses a special kernel. It sums blocks of 1024 indices and lacks a barrier
between two blocks, so gradients are silently wrong in rare cases (pytorch/pytorch#187687, fixed in
June 2026). A single block is safe, and so are many indices, which use a sorting kernel. As of torch
2.11, that kernel adds with atomics if few indices are distinct (pytorch/pytorch#170589): the
last bits of the sums vary between runs.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor

RACY_COUNTS = range(1025, 4097)
"""Numbers of indices that may use the racy kernel: up to 3072, or 4096 with Hopper's limit of
pytorch/pytorch#137237."""


def avoid_racy_counts(network: Any) -> None:
    """Patch a Hugging Face model's embedding to pad lookups that could use the racy kernel.

    The padding repeats the first token. The embeddings of the padding are cut off, so their
    gradients are exactly zero and the sums do not change.
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
