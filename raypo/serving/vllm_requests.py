"""Conversion of requests and responses to and from vLLM's classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raypo.serving.requests import Completion, SamplingRequest


def sampling_params(request: SamplingRequest) -> Any:
    """Convert a request to vLLM's parameters."""
    from vllm import SamplingParams

    return SamplingParams(
        n=1,
        max_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k or 0,  # 0 is all
        min_p=request.min_p,
        seed=request.seed,
        stop_token_ids=list(request.stop_token_ids),
        stop=list(request.stop),
        ignore_eos=True,  # stop_token_ids say all
        logprobs=0,  # the sampled token's only
        flat_logprobs=True,  # lists of numbers; else a dict and an object for each token
        detokenize=bool(request.stop),
    )


def completion_of(
    token_ids: Sequence[int],
    log_probs: Any,
    finish_reason: str,
    versions: Sequence[tuple[int, int]] = (),
) -> Completion:
    """Convert what vLLM returns for a request.

    Args:
        log_probs: vLLM's `FlatLogprobs` of the tokens; None without tokens.
        versions: Weight versions, each with the first token that it was to sample, in order.
    """
    ids, sampled = list(token_ids), dict(versions)  # of two at one token the later one has sampled
    spans = [(first, version) for first, version in sampled.items() if first < len(ids)]
    values = log_probs.logprobs if ids else []
    assert not ids or log_probs.token_ids == ids, "vLLM has one log-prob for each sampled token"
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        log_probs=np.array(values, dtype=np.float32),
        finish_reason=finish_reason,
        weight_version=spans[0][1] if spans else -1,
        later_versions=tuple(spans[1:]),
    )
