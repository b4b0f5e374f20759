"""Clients of engines, reference models and reward models.

`EngineClient` calls vLLM engines: replicas of a deployment, or one in this process for `raypo eval`
(`local_handle`). Only a run's first worker calls them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np

from raypo.cluster.actors import survivors
from raypo.concurrency import background_future
from raypo.deployment.handle import DeploymentHandle
from raypo.serving.engine import Engine
from raypo.serving.frozen import (
    FrozenModel,
    Ids,
    ReferenceModel,
    RewardModel,
    TopTokens,
    TorchModel,
)
from raypo.serving.requests import Completion, SamplingRequest
from raypo.serving.vllm_frozen import VllmJudge
from raypo.types import Rollout
from raypo.weights.store import WeightSnapshot

T = TypeVar("T")
OnCompletion = Callable[[int, Completion], object]
Completions = Future[list[Completion]]
"""Future of a list with one completion for each request, in the order given."""


@dataclass(frozen=True)
class ServiceClient:
    """Client of a deployment: the part that engines and frozen models share."""

    handle: DeploymentHandle

    def wait(self, timeout_s: float) -> None:
        """Wait until every replica has started (`DeploymentHandle.wait`)."""
        self.handle.wait(timeout_s)

    def peak_memory(self) -> list[Future[dict[str, float]]]:
        """Return the peak memory of each replica's processes, in GB."""
        return self.handle.control(FrozenModel.peak_memory)  # only the name of the method is sent


class EngineClient(ServiceClient):
    """Client of a deployment of engines; any number of threads may use it.

    `generate` and `submit` call one engine, and are retried if this engine is lost. All other
    methods call every engine and are never retried. What only a push or a single caller needs is
    called by its method: `engines.handle.control(Engine.resume)`.
    """

    def per_engine(self) -> list[EngineClient]:
        """Return a client for each engine, which calls others only while that one is down."""
        return [EngineClient(handle) for handle in self.handle.per_replica()]

    def generate(
        self, requests: Sequence[SamplingRequest], on_completion: OnCompletion | None = None
    ) -> Completions:
        """Sample an exclusive batch: no other request shares its steps (`Engine.submit`).

        Args:
            requests: The batch.
            on_completion: Callback `(index, completion)` for completions that are ready before the
                whole batch is. Called from any thread, possibly twice for one index.
        """
        handle = self.handle.reporting(on_completion)
        return handle.call(Engine.submit, requests, alone=True)

    def submit(
        self, requests: Sequence[SamplingRequest], on_completion: OnCompletion | None = None
    ) -> Completions:
        """Sample requests that join the running batch at any step (`Engine.submit`)."""
        return self.handle.reporting(on_completion).call(Engine.submit, requests)

    def sample_on_all(
        self, requests: Sequence[SamplingRequest], *, alone: bool
    ) -> list[list[Completion]]:
        """Sample the same requests on every engine that is up. If none is up, wait for one.

        Args:
            requests: The requests.
            alone: True makes them an exclusive batch. False lets them join running batches.

        Returns:
            The completions of each engine. An engine that was just lost is left out: after its
            restart it loads the required pushes before its first request.
        """
        answers = survivors(self.handle.call_all(Engine.submit, requests, alone=alone))
        return answers or [self.handle.call(Engine.submit, requests, alone=alone).result()]

    def require(self, *pushes: WeightSnapshot) -> None:
        """Set the pushes that an engine loads before each request, if it lacks them."""
        self.handle.require(Engine.hold if pushes else None, *pushes)

    def sleep(self, *, before_push: bool = False) -> list[Future[None]]:
        """Free the GPU's memory (`Engine.sleep`)."""
        return self.handle.control(Engine.sleep, before_push=before_push)

    def wake_up(self, part: Literal["weights", "kv_cache"] | None = None) -> list[Future[None]]:
        """Reallocate GPU memory for `weights`, `kv_cache` or both (`Engine.wake_up`)."""
        return self.handle.control(Engine.wake_up, part)


class FrozenClient(ServiceClient):
    """Client of a deployment of a frozen model: reference, teacher, reward model or judge."""

    # Only method names are sent, and `TorchModel` and `VllmModel` have the same methods.
    def sleep(self) -> list[Future[None]]:
        """Free the GPU's memory of every replica."""
        return self.handle.control(TorchModel.sleep)

    def wake_up(self) -> list[Future[None]]:
        """Reallocate the GPU memory of every replica."""
        return self.handle.control(TorchModel.wake_up)

    def _split(
        self,
        method: Callable[..., list[T]],
        items: Sequence[Any],
        groups: Sequence[Any],
        **arguments: Any,
    ) -> Future[list[T]]:
        """Call a method on all replicas, each with whole groups of the items.

        Args:
            method: Method with a list of items as its argument, which returns a list of as many.
            items: The items.
            groups: Key of the group of each item, such as its prompt.
            arguments: Further arguments of the method.

        Returns:
            A future of the values, in the order of the items.
        """
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        parts: list[list[int]] = [[] for _ in self.handle.replicas]
        for index, group in enumerate(groups):
            parts[numbers[group] % len(parts)].append(index)

        async def values() -> list[T]:
            used = [part for part in parts if part]
            calls = [
                self.handle.call(method, [items[n] for n in part], **arguments) for part in used
            ]
            answers = await asyncio.gather(*map(asyncio.wrap_future, calls))
            by_index = {
                index: value
                for part, answer in zip(used, answers, strict=True)
                for index, value in zip(part, answer, strict=True)
            }
            return [by_index[index] for index in range(len(items))]

        return background_future(values())


class ReferenceClient(FrozenClient):
    """Client of a reference model, or of a teacher."""

    def log_probs(self, rollouts: list[Rollout]) -> Future[list[np.ndarray]]:
        """Return the log-probs of each response's tokens in nats, float32 [T]."""
        return self._split(ReferenceModel.log_probs, rollouts, _groups(rollouts))

    def top_log_probs(
        self, sequences: Sequence[Ids], count: int, vocabulary: int
    ) -> Future[list[TopTokens]]:
        """Return the top tokens at each response position (`ReferenceModel.top_log_probs`)."""
        method, groups = ReferenceModel.top_log_probs, range(len(sequences))
        return self._split(method, sequences, groups, count=count, vocabulary=vocabulary)


class JudgeClient(FrozenClient):
    """Client of a judge."""

    def answers(self, prompts: list[str]) -> Future[list[str | ValueError]]:
        """Return the judge's answer to each prompt, in the order given (`VllmJudge.answers`)."""
        return self._split(VllmJudge.answers, prompts, range(len(prompts)))


class RewardModelClient(FrozenClient):
    """Client of a reward model."""

    def score(self, rollouts: list[Rollout]) -> Future[list[float]]:
        """Return one score for each rollout, in the order given."""
        return self._split(RewardModel.score, rollouts, _groups(rollouts))


def _groups(rollouts: Sequence[Rollout]) -> list[int]:
    return [rollout.group_index for rollout in rollouts]
