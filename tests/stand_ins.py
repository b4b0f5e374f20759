"""Stand-ins for engines, reference, reward models, a tokenizer and a transport.

Pushes to an engine in the test's own process are made here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from raypo.collectives import Workers
from raypo.concurrency import completed
from raypo.serving.client import Completions, Engines, OnCompletion
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Rollout
from raypo.weight_sync.transport import NamedTensors, Transport
from raypo.weights.buckets import Bucket, as_bytes, grouped, specs_of
from raypo.weights.manifest import Manifest, checksums
from raypo.weights.messages import WeightPush
from raypo.weights.store import WeightSnapshot


@dataclass
class Engine(Engines):
    """One engine whose completions a test makes; every push has arrived."""

    answers: Callable[[list[SamplingRequest]], list[Completion]]

    def generate(
        self, requests: Sequence[SamplingRequest], on_completion: OnCompletion | None = None
    ) -> Completions:
        return completed(self.answers(list(requests)))

    submit = generate

    def per_engine(self) -> Sequence[Engines]:
        return [self]

    def generate_on_all(self, requests: Sequence[SamplingRequest]) -> list[Completions]:
        return [self.generate(requests)]

    submit_on_all = generate_on_all

    def require(self, *pushes: WeightSnapshot) -> None:
        pass


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


class NoTransport(Transport):
    """Weights never get anywhere."""

    def push(
        self, named_tensors: NamedTensors, engines: Engines, *, version: int, workers: Workers
    ) -> None:
        pass


def pack(named_tensors: Iterable[tuple[str, Tensor]], *, bucket_bytes: int) -> Iterator[Bucket]:
    """Copies of the tensors, on the CPU; lazy and sized as in `stage`."""
    copies = ((name, tensor.detach().clone()) for name, tensor in named_tensors)
    for group in grouped(copies, bucket_bytes=bucket_bytes):
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
