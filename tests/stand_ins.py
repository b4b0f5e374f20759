"""Stand-ins for what a step asks: engines, reference, reward models, a tokenizer, a transport.

What is pushed to an engine in the test's own process is made here too. Each stand-in is typed by
what its callers ask of it, so that a type checker tells when it is outgrown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from raypo.deployed import Here
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Rollout
from raypo.weights.buckets import Bucket, as_bytes, grouped, specs_of
from raypo.weights.manifest import Manifest, checksums
from raypo.weights.store import Kept
from raypo.weights.transport import NamedTensors, PushedEngines, Receivers, WeightPush


@dataclass
class Engine:
    """One engine, whose answers a test makes; every push has arrived."""

    answers: Callable[[list[SamplingRequest]], list[Completion]]

    @property
    def generate(self) -> Here[[list[SamplingRequest]], list[Completion]]:
        return Here(self.answers)

    submit = generate

    async def join(self, request: SamplingRequest) -> Completion:
        (completion,) = self.answers([request])
        return completion

    def each_preferred(self) -> list[Engine]:
        return [self]

    def pinned(self) -> Receivers:
        raise NotImplementedError("nothing is sent to it")

    def require(self, method: str | None, *args: object) -> None:
        pass


@dataclass
class Reference:
    log_probs: Here[[list[Rollout]], list[np.ndarray]]


@dataclass
class RewardModel:
    score: Here[[list[Rollout]], list[float]]


class Lossy:
    """A tokenizer that decodes everything to one text, as many do with spaces and bytes."""

    def batch_decode(self, ids: list[np.ndarray], /, *, skip_special_tokens: bool) -> list[str]:
        return ["?"] * len(ids)


class AskedInLots:
    """Engines that no episode asks."""

    async def join(self, request: SamplingRequest) -> Completion:
        raise AssertionError(f"{request} was asked by itself")


class NoTransport:
    """Weights never get anywhere."""

    kept: Kept | None = None

    def push(
        self, named_tensors: NamedTensors, engines: PushedEngines, *, version: int, workers: object
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
