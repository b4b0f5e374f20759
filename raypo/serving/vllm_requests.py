"""Requests and answers on their way in and out of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from raypo.serving.requests import Completion, SamplingRequest


def sampling_params(request: SamplingRequest) -> Any:
    """A request in vLLM's words."""
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
        detokenize=bool(request.stop),
    )


def completion_of(
    token_ids: Sequence[int],
    log_probs: Sequence[Any],
    finish_reason: str,
    versions: Sequence[tuple[int, int]] = (),
) -> Completion:
    """vLLM's answer in ours.

    Args:
        log_probs: By token, what vLLM says of the tokens that it looked at.
        versions: Of the weights, each with the first token that they were to sample, in order.
    """
    ids, sampled = list(token_ids), dict(versions)  # of two at one token the later one has sampled
    spans = [(first, version) for first, version in sampled.items() if first < len(ids)]
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        log_probs=np.array(
            [at[token].logprob for token, at in zip(ids, log_probs, strict=True)], dtype=np.float32
        ),
        finish_reason=finish_reason,
        weight_version=spans[0][1] if spans else -1,
        later_versions=tuple(spans[1:]),
    )
