"""What a push asks of a deployment's handle, on bare actors, for tests that need no controller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import ray
from ray.actor import ActorHandle

from raypo.deployed import MethodOfAll
from raypo.weights.manifest import Manifest
from raypo.weights.messages import OfferedBucket, Rendezvous
from raypo.weights.transport import PushStart, Ready

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class PlainResponse(Generic[T]):
    ref: ray.ObjectRef[T]

    def result(self) -> T:
        return ray.get(self.ref)

    def failure(self) -> Exception | None:
        if not ray.wait([self.ref], timeout=0)[0]:
            return None
        try:
            ray.get(self.ref)
        except Exception as error:
            return error
        return None


@dataclass
class PlainMethod(Generic[P, T]):
    actors: list[Any]
    name: str

    def on_all(self, *args: P.args, **kwargs: P.kwargs) -> list[PlainResponse[T]]:
        calls = [getattr(actor, self.name) for actor in self.actors]
        return [PlainResponse(call.remote(*args, **kwargs)) for call in calls]


class PlainHandle:
    def __init__(self, actors: dict[str, ActorHandle]) -> None:
        self._actors = actors

    @property
    def begin_push(self) -> MethodOfAll[[PushStart], Ready]:
        return PlainMethod(list(self._actors.values()), "begin_push")

    @property
    def join_group(self) -> MethodOfAll[[Rendezvous], None]:
        return PlainMethod(list(self._actors.values()), "join_group")

    @property
    def load_bucket(self) -> MethodOfAll[[OfferedBucket], None]:
        return PlainMethod(list(self._actors.values()), "load_bucket")

    @property
    def finish_push(self) -> MethodOfAll[[Manifest], Manifest]:
        return PlainMethod(list(self._actors.values()), "finish_push")

    @property
    def hold(self) -> MethodOfAll[..., None]:
        return PlainMethod(list(self._actors.values()), "hold")

    def pinned(self) -> PlainHandle:
        return self

    def require(self, method: str | None, *args: object) -> None:
        pass
