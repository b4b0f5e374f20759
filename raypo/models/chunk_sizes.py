"""Sizes of chunks in forward passes. `raypo plan` reads them without importing torch."""

from __future__ import annotations

CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Number of logits in a chunk, by device type. Each chunk reads the head's weight and the float32
sum of that weight's gradient once, so larger chunks cause less memory traffic."""
ROWS = {"cpu": 1, "cuda": 2048}
"""A chunk's rows are a multiple of this, by device type. With fewer rows, the products of a chunk
have too few tiles for all multiprocessors of a GPU. A vocabulary of more than 65,536 tokens
therefore has larger chunks than `CHUNK_ELEMENTS`."""
SCRATCH_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}
"""Number of logits processed in float32 at a time, by device type. On CPUs they fit the caches."""
FLEX_BLOCK = 128
"""Block size of flex attention, in tokens."""
MAX_PADDING = 0.03
"""Largest share of tokens that may be added so that responses begin with a block. With responses of
512 tokens to prompts of 256, this reduces the scores that are computed by a quarter, and the blocks
that are masked in part to a quarter."""
SHARED_SCORES = 4096
"""Threshold of prompt sharing on CPUs: the mean number of attention scores per prompt that separate
rows would repeat. Above it, a prompt is computed once for all its responses. The threshold exists
because each shared prompt costs extra calls."""


def chunk_rows(vocabulary: int, device: str, *, is_fused: bool = True) -> int:
    """Return the number of tokens in a chunk of logits.

    Args:
        vocabulary: Number of logits of a token.
        device: Device type.
        is_fused: False for a function of the logits that autograd differentiates. It holds several
            float32 copies of a chunk, so its chunks have any number of rows.
    """
    multiple = ROWS[device] if is_fused else 1
    return max(multiple, CHUNK_ELEMENTS[device] // vocabulary // multiple * multiple)


def repeated_scores(prompt_tokens: int, responses: int) -> int:
    """Return the number of a prompt's attention scores that one row per response would repeat."""
    return max(0, responses - 1) * prompt_tokens**2 // 2
