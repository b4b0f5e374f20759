"""FLOPs of a model over sequences, counted as in PaLM.

A forward pass of a sequence of n tokens, of which r tokens need logits, takes

    2 (layers * W * n + hidden * vocabulary * r) + 4 * layers * attention * n^2    FLOPs

W is the number of matrix weights that one token uses in a layer (active experts only). This counts
two FLOPs per weight and token, and two attention matmuls over all pairs of tokens. A backward pass
takes twice as many FLOPs. Embeddings, norms and recomputed activations do not count.

    MFU = FLOPs of a phase / (its seconds * peak FLOP/s of the devices)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from raypo.models.model_shape import ModelShape


class Lengths(NamedTuple):
    """Sums over the sequences of one forward pass."""

    tokens: float
    """Prompt and response tokens."""
    responses: float
    """Response tokens, the ones whose logits are needed."""
    squares: float
    """Squared sequence lengths."""

    @classmethod
    def of(cls, lengths: Iterable[tuple[int, int]]) -> Lengths:
        """Sum the lengths of sequences, each given as its numbers of prompt and response tokens."""
        seen = [(prompt + response, response) for prompt, response in lengths]
        return cls(
            float(sum(tokens for tokens, _ in seen)),
            float(sum(response for _, response in seen)),
            float(sum(tokens**2 for tokens, _ in seen)),
        )


@dataclass(frozen=True)
class Groups:
    """Prompts with a group of responses each. All prompts and responses have maximum length."""

    prompts: float
    samples: int
    """Responses to each prompt."""
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> float:
        """Number of tokens in all groups. A prompt counts once for its group."""
        return self.prompts * (self.prompt_tokens + self.samples * self.response_tokens)

    def forward_flops(self, shape: ModelShape, *, with_logits: bool = True) -> float:
        """Return the FLOPs of one forward pass that computes each prompt once for its group."""
        count, again = self.prompts * self.samples, self.prompts * (self.samples - 1)
        prompt, long = self.prompt_tokens, self.prompt_tokens + self.response_tokens
        every = Lengths(count * long, count * self.response_tokens, count * long**2)
        shared = Lengths(again * prompt, 0.0, again * prompt**2)
        both = [forward_flops(shape, part, with_logits=with_logits) for part in (every, shared)]
        return both[0] - both[1]


def forward_flops(shape: ModelShape, lengths: Lengths, *, with_logits: bool = True) -> float:
    """Return the FLOPs of one forward pass, by the formula in this module's docstring.

    Args:
        shape: Sizes of the model.
        lengths: Sums over the sequences of the pass.
        with_logits: False for a model with a score head, which computes no logits.

    Example: a model has 1 layer with 10 matrix weights and attention width 2, hidden size 1 and a
    vocabulary of 5. One sequence has 1 prompt token and 2 response tokens. Its forward pass takes
    2 (1 * 10 * 3 + 1 * 5 * 2) + 4 * 1 * 2 * 3^2 = 152 FLOPs.

    Paper: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    logits = shape.hidden * shape.vocabulary * lengths.responses if with_logits else 0.0
    products = 2 * (shape.layers * shape.layer_weights * lengths.tokens + logits)
    return products + 4 * shape.layers * shape.attention * lengths.squares
