"""Deployments by the types of what their replicas answer: each method has the replicas' signature.

A handle passes on any name. Here every name that a run uses is written down once, beside the
class that answers it, so that a type checker follows a call from a recipe to the replica.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

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
class _Method:
    """A descriptor: a method of the deployment that an object holds."""

    holder: str
    name: str

    def __get__(self, owner: object, kind: type) -> Any:
        return getattr(getattr(owner, self.holder), self.name)


# Typed as what the descriptor gives: a type checker that compares an object with a protocol does
# not look through descriptors.
def _each(*replicas: Callable[Concatenate[Any, P], T]) -> _OfEach[P, T]:
    """A handle's method by the signature that it has in every class of replicas."""
    return cast(Any, _Method("handle", replicas[0].__name__))


def _each_in_time(replica: Callable[Concatenate[Any, P], list[Future[T]]]) -> _OfEntries[P, T]:
    """The same, whose futures the replica waits for: entry by entry."""
    return cast(Any, _Method("handle", replica.__name__))


def _all(*replicas: Callable[Concatenate[Any, P], T]) -> _OfAll[P, T]:
    """The same as `_each`, for pinned replicas."""
    return cast(Any, _Method("replicas", replicas[0].__name__))


@dataclass(frozen=True)
class EngineHandle:
    """A deployment of engines; any number of threads and processes may ask at the same time."""

    handle: DeploymentHandle

    generate = _each_in_time(Engine.batch)
    submit = _each_in_time(Engine.submit)

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

    peak_memory = _all(Engine.peak_memory)
    stretch = _all(Engine.stretch)
    answer_only = _all(Engine.answer_only)
    hold = _all(Engine.hold)
    begin_push = _all(Engine.begin_push)
    load_bucket = _all(Engine.load_bucket)
    finish_push = _all(Engine.finish_push)
    resume = _all(Engine.resume)
    join_group = _all(Engine.join_group)
    sleep = _all(Engine.sleep)
    wake_up = _all(Engine.wake_up)


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

    peak_memory = _all(FrozenModel.peak_memory)
    sleep = _all(TorchModel.sleep, VllmModel.sleep)
    wake_up = _all(TorchModel.wake_up, VllmModel.wake_up)


class ReferenceHandle(FrozenHandle):
    """A deployment of the reference model."""

    log_probs = _each(ReferenceModel.log_probs, VllmReference.log_probs)
    top_log_probs = _each(ReferenceModel.top_log_probs, VllmReference.top_log_probs)


class RewardModelHandle(FrozenHandle):
    """A deployment of a reward model."""

    score = _each(RewardModel.score, VllmRewardModel.score)
