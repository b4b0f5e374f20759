"""What an engine is asked and what it answers; plain data, importable without torch or vLLM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SamplingRequest:
    """One response to one prompt; with a seed of its own it does not depend on its batch."""

    prompt_ids: np.ndarray  # int32 [P]
    max_new_tokens: int
    temperature: float
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    """None: all tokens."""
    min_p: float = 0.0
    seed: int | None = 0
    """None: the engine's own random state."""
    stop_token_ids: tuple[int, ...] = ()
    """Any of them ends the response and is its last token."""
    stop: tuple[str, ...] = ()
    """Strings that end the response with the token that completes one; for engines that read text.
    """
    adapter: str | None = None
    """Name of a LoRA adapter that the engine holds; None: its own weights alone."""
    id: str = ""
    """Whose it is: `<run>/<attempt>`. What a dead attempt has asked is given back."""
    priority: int = 0
    """Lower is sampled sooner, as in vLLM; among equals, first come, first served."""
    cache_salt: str = ""
    """Keys and values of a prompt's beginning are shared by requests with the same one, as in vLLM.
    """
    timeout_s: float | None = None
    """Seconds from the call until it is given back as far as it was sampled; None: never."""


@dataclass(frozen=True)
class Completion:
    """One response as the engine sampled it."""

    token_ids: np.ndarray  # int32 [T], the stop token included when it was sampled
    log_probs: np.ndarray  # float32 [T]
    """Under the distribution that was sampled from: softmax(logits / temperature), renormalised
    over what top_p, top_k and min_p leave of it. Greedy: softmax(logits), temperature 1."""
    finish_reason: str
    """stop | length; or where it was given back before: cancelled | timeout | paused."""
    weight_version: int
    """Version of the weights that sampled its first token; of the adapter, where one was asked
    for; -1 where no token was sampled."""
    later_versions: tuple[tuple[int, int], ...] = ()
    """Where new weights came meanwhile: the first token that they sampled, and their version."""


@dataclass(frozen=True)
class Load:
    """What an engine is busy with; its counts go on from its start."""

    queued: int = 0
    """Requests that wait for their turn."""
    running: int = 0
    """Requests that vLLM samples, or has taken in to sample."""
    kv_cache_use: float = 0.0
    """Share of the KV cache that is in use, 0 to 1."""
    preemptions: int = 0
    """Times that vLLM took the KV cache from a request, to compute it again later."""
    steps: int = 0
    """Forward passes."""
    busy_s: float = 0.0
    """Seconds spent in them."""
    tokens: int = 0
    """Tokens sampled."""
    tokens_per_s: float = 0.0
    """Over the last second, or more, that was spent in steps."""


@dataclass(frozen=True)
class Stretch:
    """What an engine was busy with over some time: means over it, and peaks."""

    queued_mean: float = 0.0
    queued_max: float = 0.0
    running_mean: float = 0.0
    running_max: float = 0.0
    kv_cache_mean: float = 0.0
    kv_cache_max: float = 0.0
    idle: tuple[tuple[float, float], ...] = ()
    """Times without anything to do: begin and end, in seconds since 1970."""


def validate_request(
    request: SamplingRequest,
    *,
    vocabulary_size: int,
    max_model_len: int,
    reads_text: bool = True,
) -> None:
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
    if (request.top_k is not None and request.top_k < 1) or not 0.0 <= request.min_p <= 1.0:
        raise ValueError(
            f"top_k ({request.top_k}) must be 1 or more, or None, and min_p ({request.min_p}) must "
            "lie in [0, 1]."
        )
    if not all(request.stop) or (request.stop and not reads_text):
        raise ValueError(
            f"stop ({list(request.stop)}): an engine that is made with reads_text ends a response "
            "at texts that are not empty."
        )
    if request.timeout_s is not None and not request.timeout_s > 0.0:
        raise ValueError(
            f"timeout_s ({request.timeout_s}): a request has some time. Raise it, or leave it out "
            "for a request that may take for ever."
        )
