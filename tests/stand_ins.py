"""Stand-ins for engines, reference, reward models and a tokenizer.

Pushes to an engine in the test's own process are made here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from torch import Tensor

from raypo.rollout.engines import Engines
from raypo.serving.client import Completions, OnCompletion
from raypo.serving.engine import Engine as VllmEngine
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Rollout
from raypo.weights.buckets import Bucket, as_bytes, group_by_size, specs_of
from raypo.weights.manifest import Manifest, checksums
from raypo.weights.messages import WeightPush

T = TypeVar("T")


def completed(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future


@dataclass
class Engine:
    """One engine, as its callers see it, whose completions a test makes."""

    answers: Callable[[list[SamplingRequest]], list[Completion]]
    joins: bool = False

    def per_engine(self) -> Sequence[Engines]:
        return [self]

    def generate(
        self, requests: Sequence[SamplingRequest], on_completion: OnCompletion | None = None
    ) -> Completions:
        return completed(self.answers(list(requests)))

    def submit(
        self, requests: Sequence[SamplingRequest], on_completion: OnCompletion | None = None
    ) -> Completions:
        return self.generate(requests)


@dataclass
class Reference:
    answers: Callable[[list[Rollout]], list[np.ndarray]]

    def log_probs(self, rollouts: list[Rollout]) -> Future[list[np.ndarray]]:
        return completed(self.answers(rollouts))


@dataclass
class RewardModel:
    answers: Callable[[list[Rollout]], list[float]]

    def score(self, rollouts: list[Rollout]) -> Future[list[float]]:
        return completed(self.answers(rollouts))


class Lossy:
    """A tokenizer that decodes everything to one text, as many do with spaces and bytes."""

    def batch_decode(self, ids: list[np.ndarray], /, *, skip_special_tokens: bool) -> list[str]:
        return ["?"] * len(ids)


def generate(engine: VllmEngine, requests: Sequence[SamplingRequest]) -> list[Completion]:
    """Sample an exclusive batch on an engine of this process, and wait for it."""
    return [future.result() for future in engine.submit(requests, alone=True)]


def pack(named_tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[Bucket]:
    """Copies of the tensors, on the CPU; lazy and sized as in `stage`."""
    copies = ((name, tensor.detach().clone()) for name, tensor in named_tensors)
    for group in group_by_size(copies, bucket_bytes=bucket_bytes):
        parts = [as_bytes(tensor) for _, tensor in group]
        yield Bucket(tuple(part.numpy() for part in parts), specs_of(group, checksums(parts)))


def local_push(buckets: Iterable[Bucket], *, version: int) -> WeightPush:
    """A push that holds the buckets themselves, for an engine in this process."""
    kept = tuple(buckets)
    specs = [spec for bucket in kept for spec in bucket.specs]
    return WeightPush(version, Manifest.of(version, specs), kept)


def versions_of(completion: Completion) -> np.ndarray:
    """Version of the weights that sampled each token, as a rollout tells it; int64 [T]."""
    versions = np.full(len(completion.token_ids), completion.weight_version)
    for first, version in completion.later_versions:
        versions[first:] = version
    return versions


def seed_of(request: SamplingRequest) -> int:
    assert request.seed is not None
    return request.seed
