"""Requests, completions and load reports of an engine; importable without torch or vLLM."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raypo.types import Images


@dataclass(frozen=True)
class SamplingRequest:
    """Request for one response to one prompt.

    With a seed, the response does not depend on other requests of its batch.
    """

    prompt_ids: np.ndarray  # int32 [P]
    max_new_tokens: int
    temperature: float
    """Sampling temperature. 0 means greedy."""
    top_p: float = 1.0
    top_k: int | None = None
    """Top-k limit. None means all tokens."""
    min_p: float = 0.0
    seed: int | None = 0
    """Random seed. None uses the engine's own random state."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the response. The response keeps the stop token as its last token."""
    stop: tuple[str, ...] = ()
    """Strings that end the response once a token completes one of them. To match them, the
    engine needs a tokenizer (`reads_text`)."""
    adapter: str | None = None
    """Name of a LoRA adapter that the engine holds. None means the base weights, without an
    adapter."""
    id: str = ""
    """Owner, `<run>/<attempt>`. Requests of dead attempts are cancelled."""
    priority: int = 0
    """Lower is sampled sooner, as in vLLM; equal priorities are first come, first served."""
    cache_salt: str = ""
    """Prefix cache salt, as in vLLM: only requests with equal salts share cached prefixes."""
    with_experts: bool = False
    """True if the completion gets the experts of all tokens, from an engine that records them."""
    images: Images | None = None
    """Images of the prompt."""
    timeout_s: float | None = None
    """Seconds after which the request ends with the tokens sampled so far. None means no limit."""


@dataclass(frozen=True)
class Completion:
    """Sampled response with the log-probs of its tokens."""

    token_ids: np.ndarray  # int32 [T], the stop token included when it was sampled
    log_probs: np.ndarray  # float32 [T]
    """Log-probs under the sampling distribution: softmax(logits / temperature), renormalised over
    the tokens that top_p, top_k and min_p keep. For greedy sampling it is softmax(logits)."""
    finish_reason: str
    """stop | length; if the request was aborted: cancelled | timeout | paused."""
    weight_version: int
    """Version of the weights (of the adapter, if the request names one) that sampled the first
    token. -1 if no token was sampled."""
    later_versions: tuple[tuple[int, int], ...] = ()
    """One pair (index of the first token, version) for each weight update during the response."""
    experts: np.ndarray | None = (
        None  # uint8, or int16 for more than 256 experts, [P + T - 1, L, k]
    )
    """Experts of the tokens of prompt and response in each layer with experts. The last token has
    none, because the engine has not read it. None if they were not requested, or if no token was
    sampled."""


@dataclass(frozen=True)
class Load:
    """Load of an engine: current values, and counts since its start."""

    queued: int = 0
    """Requests in raypo's queue."""
    running: int = 0
    """Requests in vLLM, either sampling or waiting in vLLM's scheduler."""
    kv_cache_use: float = 0.0
    """Share of the KV cache that is in use, 0 to 1."""
    preemptions: int = 0
    """Times that vLLM evicted a request's KV cache, to recompute it later."""
    drafted: int = 0
    """Tokens drafted by speculative decoding."""
    accepted: int = 0
    """Drafted tokens that the policy accepted."""
    steps: int = 0
    """Engine steps (forward passes)."""
    busy_s: float = 0.0
    """Seconds spent in steps."""
    tokens: int = 0
    """Tokens sampled."""
    tokens_per_s: float = 0.0
    """Tokens per second of step time, over the last busy second or more."""


@dataclass(frozen=True)
class LoadSummary:
    """Means and peaks of an engine's load over a time span, and its idle times."""

    queued_mean: float = 0.0
    queued_max: float = 0.0
    running_mean: float = 0.0
    running_max: float = 0.0
    kv_cache_mean: float = 0.0
    kv_cache_max: float = 0.0
    idle: tuple[tuple[float, float], ...] = ()
    """Idle times as (begin, end), in seconds since the epoch."""


def validate_request(
    request: SamplingRequest,
    *,
    vocabulary_size: int,
    max_model_len: int,
    reads_text: bool = True,
    truncates: bool = True,
) -> None:
    """Raise on a request that would be truncated or would crash the engine.

    Raises:
        ValueError: the prompt is empty or has an id outside the vocabulary, the response has no
            room, or a sampling parameter is out of range.
    """
    ids = np.asarray(request.prompt_ids)
    if ids.ndim != 1 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"prompt_ids ({ids.dtype} {ids.shape}): a prompt must be a non-empty row of integers."
        )
    if ids.min() < 0 or ids.max() >= vocabulary_size:
        wrong = ids[(ids < 0) | (ids >= vocabulary_size)][0]
        raise ValueError(
            f"prompt_ids: {wrong} is not in the policy's vocabulary (0 to {vocabulary_size - 1}). "
            "Tokenise the prompts with the policy's own tokenizer."
        )
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens ({request.max_new_tokens}): must be at least 1.")
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
    if not truncates and (request.top_p < 1.0 or request.top_k or request.min_p):
        raise ValueError(
            f"top_p ({request.top_p}), top_k ({request.top_k}) or min_p ({request.min_p}): an "
            "engine with rollout.engine.speculation cannot truncate the distribution. Leave them "
            "out."
        )
    is_text = all(isinstance(each, str) and each for each in request.stop)
    if not is_text or (request.stop and not reads_text):
        raise ValueError(
            f"stop ({list(request.stop)}): stop strings must not be empty texts, and need an "
            "engine with reads_text."
        )
    if request.timeout_s is not None and not request.timeout_s > 0.0:
        raise ValueError(
            f"timeout_s ({request.timeout_s}): must be above 0. Raise it, or omit it for no time "
            "limit."
        )
