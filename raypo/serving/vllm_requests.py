"""Requests and answers on their way in and out of vLLM."""

from __future__ import annotations

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
        seed=request.seed,
        stop_token_ids=list(request.stop_token_ids),
        ignore_eos=True,  # stop_token_ids say all
        logprobs=0,  # the sampled token's only
        detokenize=False,
    )


def completion_of(output: Any, version: int) -> Completion:
    """vLLM's answer in ours, stamped with the weight version that it was sampled under."""
    ids = list(output.token_ids)
    log_probs = [at[token].logprob for token, at in zip(ids, output.logprobs, strict=True)]
    return Completion(
        token_ids=np.array(ids, dtype=np.int32),
        log_probs=np.array(log_probs, dtype=np.float32),
        finish_reason=output.finish_reason,
        weight_version=version,
    )
