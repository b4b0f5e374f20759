"""Conversion of requests and responses to and from vLLM's classes."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np

from raypo.data.images import decoded
from raypo.models.token_log_probs import PLACEHOLDER_BIAS
from raypo.serving.requests import Completion, SamplingRequest


def sampling_params(request: SamplingRequest, placeholder_id: int | None = None) -> Any:
    """Convert a request to vLLM's parameters.

    Args:
        request: The request.
        placeholder_id: Token that stands for vectors of images. It is not sampled, because the
            learner would look for images there; the learner adds the same bias.
    """
    from vllm import SamplingParams

    return SamplingParams(
        n=1,
        max_tokens=request.max_new_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k or 0,  # 0 means all tokens
        min_p=request.min_p,
        seed=request.seed,
        stop_token_ids=list(request.stop_token_ids),
        stop=list(request.stop),
        ignore_eos=True,  # stop_token_ids has the end of sequence if it is a stop token
        logprobs=0,  # only the sampled token
        flat_logprobs=True,  # lists of numbers instead of a dict and an object for each token
        detokenize=bool(request.stop),
        logit_bias=None if placeholder_id is None else {placeholder_id: PLACEHOLDER_BIAS},
        skip_clone=True,  # these parameters are of no other request
    )


def vllm_prompt(request: SamplingRequest, salt: str = "") -> dict[str, Any]:
    """Convert the prompt of a request to vLLM's `TokensPrompt`.

    vLLM itself replaces each image's slot by placeholders. Requests share entries of the prefix
    cache only if their salts are equal.
    """
    ids, images = request.prompt_ids, request.images
    prompt: dict[str, Any] = {}
    if salt := salt + request.cache_salt:
        prompt["cache_salt"] = salt
    if images is not None:
        ids = np.concatenate([images.slotted_ids, ids[images.num_prompt_tokens :]])
        prompt["multi_modal_data"] = {"image": [decoded(file) for file in images.files]}
        prompt["multi_modal_uuids"] = {"image": [sha256(file).hexdigest() for file in images.files]}
    return prompt | {"prompt_token_ids": ids.tolist()}


def check_ids(request: SamplingRequest, ids: Sequence[int]) -> None:
    """Refuse a prompt that vLLM has given other placeholders than raypo.

    Raises:
        RuntimeError: vLLM's ids are not those of the request.
    """
    if not np.array_equal(ids, request.prompt_ids):
        raise RuntimeError(
            f"vLLM reads {len(ids)} tokens for a prompt with images that has "
            f"{len(request.prompt_ids)}, so engine and learner would read different ids. The "
            "model's processor and the installed vLLM do not agree; docs/images.md names the "
            "models that were tested."
        )


def completion_of(
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    finish_reason: str,
    versions: Sequence[tuple[int, int]] = (),
    experts: Sequence[np.ndarray] | None = None,
    num_prompt_tokens: int = 0,
) -> Completion:
    """Convert vLLM's output for a request.

    Args:
        token_ids: Sampled tokens.
        log_probs: Their log-probs.
        finish_reason: Value of `Completion.finish_reason`.
        versions: (index of the first token, weight version), in order.
        experts: Parts of `Completion.experts`, perhaps with one entry more: vLLM on GPUs may have
            read the last token before it saw that it was the last. None means that they were not
            requested.
        num_prompt_tokens: Length of the prompt, for `experts`.
    """
    # If two versions have the same first token, only the later one has sampled it: `dict` keeps it.
    count, sampled = len(token_ids), dict(versions)
    spans = [(first, version) for first, version in sampled.items() if first < count]
    assert len(log_probs) == count, "vLLM has one log-prob for each sampled token"
    recorded: np.ndarray | None = None
    if experts and count:
        recorded = np.concatenate(experts)[: num_prompt_tokens + count - 1]
        assert len(recorded) == num_prompt_tokens + count - 1, "all tokens but the last were read"
    return Completion(
        token_ids=np.array(token_ids, dtype=np.int32),
        log_probs=np.array(log_probs, dtype=np.float32),
        finish_reason=finish_reason,
        weight_version=spans[0][1] if spans else -1,
        later_versions=tuple(spans[1:]),
        experts=recorded,
    )
