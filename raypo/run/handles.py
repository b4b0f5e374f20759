"""Deployments by the types of what their replicas answer: each method has the replicas' signature.

A handle passes on any name. Here every name that a run uses is written down once, beside the
class that answers it, so that a type checker follows a call from a recipe to the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from raypo.deployed import Answer, AnswerOfEntries, AnswerOfOne
from raypo.deployment.handle import DeploymentHandle, PinnedReplicas
from raypo.serving.engine import Engine
from raypo.serving.frozen import FrozenModel, ReferenceModel, RewardModel, TorchModel
from raypo.serving.requests import Completion, SamplingRequest
from raypo.serving.vllm_frozen import VllmModel, VllmReference, VllmRewardModel

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


# Not those of raypo.deployed: of one and the same Protocol a type checker wants equal parameters,
# of two it only asks whether the one accepts what the other does.
class _OfAll(Protocol[P, T_co]):
    def on_all(self, *args: P.args, **kwargs: P.kwargs) -> Sequence[AnswerOfOne[T_co]]: ...


class _OfEach(_OfAll[P, T_co], Protocol[P, T_co]):
    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Answer[T_co]: ...


class _OfEntries(_OfAll[P, list[T]], Protocol[P, T]):
    def remote(self, *args: P.args, **kwargs: P.kwargs) -> AnswerOfEntries[T]: ...


@dataclass(frozen=True)
class EngineHandle:
    """A deployment of engines; any number of threads and processes may ask at the same time."""

    handle: DeploymentHandle

    @property
    def generate(self):
        """`Engine.batch`; entry by entry, and at last when all responses are here."""
        return _each_in_time(self.handle.batch, Engine.batch)

    @property
    def submit(self):
        """`Engine.submit`; in the same way."""
        return _each_in_time(self.handle.submit, Engine.submit)

    async def join(self, request: SamplingRequest) -> Completion:
        """One response, which joins what an engine samples; no thread waits for it."""
        (completion,) = await self.handle.submit.asked([request])
        return completion

    def each_preferred(self) -> list[EngineHandle]:
        """As `DeploymentHandle.each_preferred`."""
        return [EngineHandle(each) for each in self.handle.each_preferred()]

    @property
    def preferred(self) -> tuple[int, ...]:
        """As `DeploymentHandle.preferred`."""
        return self.handle.preferred

    def known_as(self, id: str, part: Sequence[int]) -> EngineHandle:
        """As `DeploymentHandle.known_as`."""
        return EngineHandle(self.handle.known_as(id, part))

    def pinned(self) -> PinnedEngines:
        """As `DeploymentHandle.pinned`."""
        return PinnedEngines(self.handle.pinned())

    def require(self, method: str | None, *args: object) -> None:
        """As `DeploymentHandle.require`."""
        self.handle.require(method, *args)

    @property
    def required(self) -> tuple[Any, ...]:
        """As `DeploymentHandle.required`."""
        return self.handle.required

    def wait(self, timeout_s: float) -> None:
        """As `DeploymentHandle.wait`."""
        self.handle.wait(timeout_s)


@dataclass(frozen=True)
class PinnedEngines:
    """The engines that were up when a conversation with all of them began."""

    replicas: PinnedReplicas

    @property
    def names(self) -> list[str]:
        """The name of each engine, in the order in which they answer."""
        return self.replicas.names

    @property
    def peak_memory(self):
        """`Engine.peak_memory`."""
        return _all(self.replicas.peak_memory, Engine.peak_memory)

    @property
    def stretch(self):
        """`Engine.stretch`."""
        return _all(self.replicas.stretch, Engine.stretch)

    @property
    def answer_only(self):
        """`Engine.answer_only`."""
        return _all(self.replicas.answer_only, Engine.answer_only)

    @property
    def hold(self):
        """`Engine.hold`."""
        return _all(self.replicas.hold, Engine.hold)

    @property
    def begin_push(self):
        """`Engine.begin_push`."""
        return _all(self.replicas.begin_push, Engine.begin_push)

    @property
    def load_bucket(self):
        """`Engine.load_bucket`."""
        return _all(self.replicas.load_bucket, Engine.load_bucket)

    @property
    def finish_push(self):
        """`Engine.finish_push`."""
        return _all(self.replicas.finish_push, Engine.finish_push)

    @property
    def resume(self):
        """`Engine.resume`."""
        return _all(self.replicas.resume, Engine.resume)

    @property
    def join_group(self):
        """`Engine.join_group`."""
        return _all(self.replicas.join_group, Engine.join_group)

    @property
    def sleep(self):
        """`Engine.sleep`."""
        return _all(self.replicas.sleep, Engine.sleep)

    @property
    def wake_up(self):
        """`Engine.wake_up`."""
        return _all(self.replicas.wake_up, Engine.wake_up)


@dataclass(frozen=True)
class FrozenHandle:
    """A deployment of a model that is not trained."""

    handle: DeploymentHandle

    def pinned(self) -> PinnedFrozen:
        """As `DeploymentHandle.pinned`."""
        return PinnedFrozen(self.handle.pinned())

    def wait(self, timeout_s: float) -> None:
        """As `DeploymentHandle.wait`."""
        self.handle.wait(timeout_s)


@dataclass(frozen=True)
class PinnedFrozen:
    """The replicas of a frozen model that are up now."""

    replicas: PinnedReplicas

    @property
    def peak_memory(self):
        """`FrozenModel.peak_memory`."""
        return _all(self.replicas.peak_memory, FrozenModel.peak_memory)

    @property
    def sleep(self):
        """`TorchModel.sleep`, `VllmModel.sleep`."""
        return _all(self.replicas.sleep, TorchModel.sleep, VllmModel.sleep)

    @property
    def wake_up(self):
        """`TorchModel.wake_up`, `VllmModel.wake_up`."""
        return _all(self.replicas.wake_up, TorchModel.wake_up, VllmModel.wake_up)


class ReferenceHandle(FrozenHandle):
    """A deployment of the reference model."""

    @property
    def log_probs(self):
        """`ReferenceModel.log_probs`, `VllmReference.log_probs`."""
        return _each(self.handle.log_probs, ReferenceModel.log_probs, VllmReference.log_probs)

    @property
    def top_log_probs(self):
        """`ReferenceModel.top_log_probs`, `VllmReference.top_log_probs`."""
        return _each(
            self.handle.top_log_probs, ReferenceModel.top_log_probs, VllmReference.top_log_probs
        )


class RewardModelHandle(FrozenHandle):
    """A deployment of a reward model."""

    @property
    def score(self):
        """`RewardModel.score`, `VllmRewardModel.score`."""
        return _each(self.handle.score, RewardModel.score, VllmRewardModel.score)


def _each(method: _OfEach[..., Any], *replicas: Callable[Concatenate[Any, P], T]) -> _OfEach[P, T]:
    """A handle's method by the signature that it has in every class of replicas."""
    return method


def _each_in_time(
    method: _OfEntries[..., Any], *replicas: Callable[Concatenate[Any, P], list[Future[T]]]
) -> _OfEntries[P, T]:
    """The same as `_each`, for a method whose futures the replica waits for."""
    return method


def _all(method: _OfAll[..., Any], *replicas: Callable[Concatenate[Any, P], T]) -> _OfAll[P, T]:
    """The same as `_each`, for pinned replicas."""
    return method
