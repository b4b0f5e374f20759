"""The JSON that reward clients and servers speak.

    POST /score   {"samples": [{"prompt": "2+2=", "response": "4", "label": "4", ...}, ...]}
    200           {"scores": [1.0, null, ...]}      one per sample, in order; null: it has none;
                  {"score": 1.0, "format": 0.2, ...} in its place: with named parts
    4xx, 5xx      {"error": "what went wrong"}
    GET /health   {"status": "ok", "name": "..."}

A sample has the fields of SAMPLE_FIELDS; a server may ignore all but prompt and response. With a
token the client sends `Authorization: Bearer <token>`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np

from raypo.rewards.scoring import SCORE, parts_of
from raypo.types import Rollout

TOKEN_VARIABLE = "RAYPO_REWARD_TOKEN"
"""Environment variable of the token, of client and server."""
SAMPLE_FIELDS = (
    "prompt",
    "response",
    "label",
    "prompt_ids",
    "response_ids",
    "finish_reason",
    "prompt_index",
    "sample_index",
    "messages",
    "data_source",
)


class WireError(ValueError):
    """What arrived is not what the protocol says."""


def to_request(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The body of a request for the scores of some rollouts."""
    return {"samples": [_sample(rollout) for rollout in rollouts]}


def from_request(body: Any) -> list[Rollout]:
    """The rollouts of a request; fields that are not sent get what is neutral.

    Raises:
        WireError: it is not a list of samples with prompt and response.
    """
    samples = body.get("samples") if isinstance(body, dict) else None
    if not isinstance(samples, list):
        raise WireError('the body must be {"samples": [...]}')
    return [_rollout(sample, place) for place, sample in enumerate(samples)]


def from_answer(body: Any, count: int) -> list[float | dict[str, Any] | None]:
    """The scores of an answer to a request with `count` samples, those with parts as they came.

    Raises:
        WireError: it is not one number or null per sample.
    """
    scores = body.get("scores") if isinstance(body, dict) else None
    if not isinstance(scores, list) or len(scores) != count:
        found = f"{len(scores)} scores" if isinstance(scores, list) else f"{body!r:.200}"
        raise WireError(f'the answer must be {{"scores": [{count} numbers]}}, it is {found}')
    for score in scores:
        if isinstance(score, dict) and SCORE in score:
            continue
        if score is not None and (isinstance(score, str) or not isinstance(score, Real)):
            raise WireError(f"a score must be a number or null, one is {score!r:.200}")
    return [score if score is None or isinstance(score, dict) else float(score) for score in scores]


def to_answer(scores: Sequence[float]) -> dict[str, Any]:
    """The body of an answer; what is not finite becomes null."""
    return {"scores": [_answered(score) if math.isfinite(score) else None for score in scores]}


def _answered(score: float) -> float | dict[str, float]:
    parts = parts_of(score)
    return {SCORE: float(score), **parts} if parts else score


def _sample(rollout: Rollout) -> dict[str, Any]:
    sample = {name: getattr(rollout, name) for name in SAMPLE_FIELDS}
    for name, value in sample.items():
        if isinstance(value, np.ndarray | np.generic):
            sample[name] = value.tolist()
    return sample


def _rollout(sample: Any, place: int) -> Rollout:
    if not isinstance(sample, dict) or not all(
        isinstance(sample.get(name), str) for name in ("prompt", "response")
    ):
        raise WireError(f"sample {place} must have the texts prompt and response")
    try:
        prompt_ids, response_ids = (
            np.asarray(sample.get(name) or [], dtype=np.int32)
            for name in ("prompt_ids", "response_ids")
        )
        indices = [int(sample.get(name) or 0) for name in ("prompt_index", "sample_index")]
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"sample {place} has ids or indices that are not integers") from error
    messages = sample.get("messages")
    if messages is not None and not (
        isinstance(messages, list) and all(isinstance(each, dict) for each in messages)
    ):
        raise WireError(f"sample {place} has messages that are not a list of objects")
    return Rollout(
        prompt=sample["prompt"],
        response=sample["response"],
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        log_probs=np.zeros(len(response_ids), dtype=np.float32),
        response_mask=np.ones(len(response_ids), dtype=bool),
        label=sample.get("label"),
        prompt_index=indices[0],
        sample_index=indices[1],
        finish_reason=str(sample.get("finish_reason") or "stop"),
        weight_version=0,
        messages=messages,
        data_source=str(sample["data_source"]) if sample.get("data_source") else None,
    )
