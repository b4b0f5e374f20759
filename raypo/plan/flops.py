"""Arithmetic that models need for the texts that pass them, as PaLM counts it.

A forward pass of a sequence of n tokens, r of whose logits are needed, takes

    2 (layers * W * n + hidden * vocabulary * r) + 4 * layers * attention * n^2    FLOPs

with W matrix weights of a layer that one token passes (of its own experts only): two FLOPs per
weight and token, and two products of attention over all pairs of tokens. A backward pass takes
twice as many. Embeddings, norms and what is computed twice to save memory do not count.

    MFU = FLOPs of a phase / (its seconds * peak FLOP/s of the devices)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from raypo.plan.model_shape import ModelShape


class Lengths(NamedTuple):
    """Sums over sequences that pass a model once."""

    tokens: float
    """Prompt and response."""
    responses: float
    """Response tokens: those whose logits are needed."""
    squares: float
    """Tokens squared."""

    @classmethod
    def of(cls, lengths: Iterable[tuple[int, int]]) -> Lengths:
        """The sums over sequences, each given by its number of prompt and response tokens."""
        seen = [(prompt + response, response) for prompt, response in lengths]
        return cls(
            float(sum(tokens for tokens, _ in seen)),
            float(sum(response for _, response in seen)),
            float(sum(tokens**2 for tokens, _ in seen)),
        )


@dataclass(frozen=True)
class Groups:
    """Prompts and the responses to each, all as long as they may be."""

    prompts: float
    samples: int
    """Responses to each prompt."""
    prompt_tokens: int
    response_tokens: int

    @property
    def tokens(self) -> float:
        """Tokens of all groups; a prompt is read once."""
        return self.prompts * (self.prompt_tokens + self.samples * self.response_tokens)

    def within(self, tokens: int) -> Groups:
        """As many whole groups as have so many tokens, else one of fewer or shorter responses."""
        each = self.prompt_tokens + self.samples * self.response_tokens
        if each <= tokens:
            return replace(self, prompts=max(1, min(int(self.prompts), tokens // each)))
        samples = max(1, (tokens - self.prompt_tokens) // self.response_tokens)
        part = min(1.0, tokens / (self.prompt_tokens + samples * self.response_tokens))
        prompt, response = int(part * self.prompt_tokens), int(part * self.response_tokens)
        return Groups(1, samples, max(1, prompt), max(2, response))

    def forward_flops(self, shape: ModelShape, *, with_logits: bool = True) -> float:
        """FLOPs of one forward pass, each prompt read once for its responses."""
        count, again = self.prompts * self.samples, self.prompts * (self.samples - 1)
        prompt, long = self.prompt_tokens, self.prompt_tokens + self.response_tokens
        every = Lengths(count * long, count * self.response_tokens, count * long**2)
        shared = Lengths(again * prompt, 0.0, again * prompt**2)
        both = [forward_flops(shape, each, with_logits=with_logits) for each in (every, shared)]
        return both[0] - both[1]


def forward_flops(shape: ModelShape, lengths: Lengths, *, with_logits: bool = True) -> float:
    """FLOPs of one forward pass over all sequences; without logits for a model with a score head.

    Example: one layer of 10 matrix weights and attention width 2, hidden 1, vocabulary 5, and one
    sequence of 3 tokens, 2 of them a response: 2 (30 + 10) + 4 * 2 * 9 = 152.

    Paper: Chowdhery et al. 2022, arXiv:2204.02311, appendix B.
    """
    logits = shape.hidden * shape.vocabulary * lengths.responses if with_logits else 0.0
    products = 2 * (shape.layers * shape.layer_weights * lengths.tokens + logits)
    return products + 4 * shape.layers * shape.attention * lengths.squares
