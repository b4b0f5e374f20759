"""What an engine is asked and what it answers; plain data, importable without torch or vLLM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SamplingRequest:
    """One response to one prompt, with a seed of its own: the batch it rides in does not matter."""

    prompt_ids: np.ndarray  # int32 [P]
    max_new_tokens: int
    temperature: float
    """0 is greedy."""
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Any of them ends the response and is its last token; nothing else ends it early."""
    adapter: str | None = None
    """Name of a LoRA adapter that the engine holds; None: its own weights alone."""


@dataclass(frozen=True)
class Completion:
    """One response as the engine sampled it."""

    token_ids: np.ndarray  # int32 [T], the stop token included when it was sampled
    log_probs: np.ndarray  # float32 [T]
    """Under the distribution that was sampled from: softmax(logits / temperature), renormalised
    over the nucleus when top_p is below 1. Greedy: softmax(logits), temperature 1."""
    finish_reason: str
    """stop | length."""
    weight_version: int
    """Version of the weights that sampled it; of the adapter, where one was asked for."""


def validate_request(request: SamplingRequest, *, vocabulary_size: int, max_model_len: int) -> None:
    """Refuse what would be cut short or would kill the engine.

    Raises:
        ValueError: an id outside of the vocabulary, an empty prompt, no room for the response, or
            a sampling parameter outside of its range.
    """
    ids = np.asarray(request.prompt_ids)
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"prompt_ids ({ids.dtype} {ids.shape}): a prompt is a non-empty row of integers."
        )
    if ids.min() < 0 or ids.max() >= vocabulary_size:
        wrong = ids[(ids < 0) | (ids >= vocabulary_size)][0]
        raise ValueError(
            f"prompt_ids: {wrong} is not in the policy's vocabulary (0 to {vocabulary_size - 1}). "
            "Tokenise the prompts with the policy's own tokenizer."
        )
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens ({request.max_new_tokens}): a response has a token.")
    if ids.size + request.max_new_tokens > max_model_len:
        raise ValueError(
            f"a prompt of {ids.size} tokens leaves no room for max_new_tokens "
            f"({request.max_new_tokens}) in the engine's max_model_len ({max_model_len}). "
            "Shorten the prompt or the response, or start the engine with more room."
        )
    if request.temperature < 0.0 or not 0.0 < request.top_p <= 1.0:
        raise ValueError(
            f"temperature ({request.temperature}) must not be negative and top_p "
            f"({request.top_p}) must lie in (0, 1]."
        )
