"""Sizes of chunks in forward passes. Without torch, for `raypo plan`."""

from __future__ import annotations

CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits in a chunk, by device. Each chunk reads the head's weight once, and also the float32 sum
of its gradient."""
SCRATCH_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Logits of a chunk that are processed in float32 at a time: on CPUs as many as caches hold."""
SHARED_SCORES = 4096
"""Threshold on CPUs for computing a prompt once for its responses: the mean number of attention
scores per prompt that whole rows would repeat. Each shared prompt costs extra calls."""


def repeated_scores(prompt_tokens: int, responses: int) -> int:
    """Return the attention scores within a prompt that are repeated if each response is a row."""
    return max(0, responses - 1) * prompt_tokens**2 // 2
