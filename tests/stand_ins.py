"""Stand-ins for what a step asks: engines, reference, reward models, a tokenizer, a transport.

Each is typed by what its callers ask of it, so that a type checker tells when it is outgrown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from raypo.calls import Here
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Rollout
from raypo.weights.store import Kept
from raypo.weights.transport import NamedTensors, PushedEngines, Receivers


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
