"""JSON protocol between reward clients and servers.

    POST /score   {"samples": [{"prompt": "2+2=", "response": "4", "label": "4", ...}, ...]}
    200           {"scores": [1.0, null, ...]}      one score per sample, in order. null means no
                  score. A score may also be an object with named numbers and strings:
                  {"score": 1.0, "format": 0.2, ...}
    4xx, 5xx      {"error": "what went wrong"}
    GET /health   {"status": "ok", "name": "..."}    the name only with the token, if there is one

With a token the client sends `Authorization: Bearer <token>`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import date, time
from decimal import Decimal
from numbers import Real
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from raypo.rewards.scoring import LARGEST, SCORE, RewardError, is_too_large, parts_of, texts_of
from raypo.types import Rollout

TOKEN_VARIABLE = "RAYPO_REWARD_TOKEN"
"""Environment variable with the token, for client and server."""
Ids = Annotated[list[Annotated[int, Field(ge=-(2**31), lt=2**31)]], Field(fail_fast=True)]


class WireError(ValueError):
    """A message that violates the protocol."""


class Sample(BaseModel):
    """A rollout in a request. A server may ignore all fields except prompt and response."""

    prompt: str
    response: str
    label: Any = None
    prompt_ids: Ids | None = None
    response_ids: Ids | None = None
    finish_reason: str | None = None
    prompt_index: int | None = None
    sample_index: int | None = None
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    data_source: str | None = None
    row: dict[str, Any] = Field(default_factory=dict)
    """Columns of the data that JSON can hold."""


class _Request(BaseModel):
    # fail_fast, because a body of 64 MB can have millions of errors, which would take all memory.
    samples: Annotated[list[Sample], Field(fail_fast=True)]


def to_request(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the body of a request for the scores of rollouts.

    Raises:
        RewardError: JSON cannot hold a label or a message.
    """
    return {"samples": [_sample(rollout) for rollout in rollouts]}


def from_request(content: bytes) -> list[Rollout]:
    """Parse the rollouts of a request. Missing fields get neutral values.

    Raises:
        WireError: the body is not JSON, or not a list of samples.
    """
    try:
        return [_rollout(sample) for sample in _Request.model_validate_json(content).samples]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise WireError(f'{where}: {first["msg"]}; a request is {{"samples": [...]}}') from None


def from_answer(body: Any, count: int) -> list[float | dict[str, Any] | None]:
    """Validate the body of a server's response to `count` samples, and return the scores.

    A score with named parts is a mapping.

    Raises:
        WireError: the body does not have one number, mapping or null per sample.
    """
    scores = body.get("scores") if isinstance(body, dict) else None
    if not isinstance(scores, list) or len(scores) != count:
        problem = f"{len(scores)} scores" if isinstance(scores, list) else f"{body!r:.200}"
        raise WireError(f'the answer must be {{"scores": [{count} numbers]}}, but it is {problem}')
    for score in scores:
        if isinstance(score, dict) and SCORE in score:
            continue
        if score is not None and (isinstance(score, str) or not isinstance(score, Real)):
            raise WireError(f"a score must be a number or null, but one is {score!r:.200}")
        if score is not None and is_too_large(score):
            raise WireError(f"a score must be at most {LARGEST:.2g} (float32), but one is larger")
    return [score if score is None or isinstance(score, dict) else float(score) for score in scores]


def to_answer(scores: Sequence[float]) -> dict[str, Any]:
    """Return the body of a server's response. Scores that are not finite become null."""
    return {"scores": [_answered(score) if math.isfinite(score) else None for score in scores]}


def _answered(score: float) -> float | dict[str, Any]:
    named = {**parts_of(score), **texts_of(score)}
    return {SCORE: float(score), **named} if named else score


def _sample(rollout: Rollout) -> dict[str, Any]:
    sample: dict[str, Any] = {"row": {}}
    for column, value in rollout.row.items():
        with suppress(ValueError):  # leave out columns that JSON cannot hold, such as images
            sample["row"][column] = _plain(value)
    for name in Sample.model_fields.keys() - sample.keys():
        try:
            sample[name] = _plain(getattr(rollout, name))
        except ValueError as error:
            key = "data.label_key" if name == "label" else "data.prompt_key"
            raise RewardError(
                f"{key}: the {name} of row {rollout.prompt_index} has {error}, which JSON cannot "
                "hold, and reward.url sends JSON. Write it as text or a number, or set "
                "reward.function in place of reward.url."
            ) from None
    return sample


def _plain(value: Any) -> Any:
    """Convert a value to JSON types. Dates and decimals, which parquet may hold, become text.

    Raises:
        ValueError: JSON has no form for a value; the message names the value.
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, str):
        with suppress(UnicodeEncodeError):
            value.encode()
            return value
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(entry) for key, entry in value.items()}
    raise ValueError(f"{value!r:.80} ({type(value).__name__})")


def _rollout(sample: Sample) -> Rollout:
    response_ids = np.asarray(sample.response_ids or [], dtype=np.int32)
    return Rollout(
        prompt=sample.prompt,
        response=sample.response,
        prompt_ids=np.asarray(sample.prompt_ids or [], dtype=np.int32),
        response_ids=response_ids,
        log_probs=np.zeros(len(response_ids), dtype=np.float32),
        response_mask=np.ones(len(response_ids), dtype=bool),
        label=sample.label,
        prompt_index=sample.prompt_index or 0,
        sample_index=sample.sample_index or 0,
        finish_reason=sample.finish_reason or "stop",
        weight_version=0,
        messages=sample.messages,
        data_source=sample.data_source,
        row=sample.row,
    )
