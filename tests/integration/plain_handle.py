"""Engines for a push, as bare actors: for tests that need no deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import ray
from ray.actor import ActorHandle

from raypo.config import InFlight
from raypo.serving.client import Engines, PinnedEngines
from raypo.weights.manifest import Manifest
from raypo.weights.messages import OfferedBucket, PushStart, Ready, Rendezvous
from raypo.weights.store import WeightSnapshot

T = TypeVar("T")


@dataclass
class PlainCall(Generic[T]):
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


class PlainHandle(Engines, PinnedEngines):
    def __init__(self, actors: dict[str, ActorHandle]) -> None:
        self._actors = actors

    def _call(self, name: str, *args: Any, **kwargs: Any) -> list[PlainCall[Any]]:
        methods = [getattr(actor, name) for actor in self._actors.values()]
        return [PlainCall(method.remote(*args, **kwargs)) for method in methods]

    def begin_push(self, start: PushStart) -> list[PlainCall[Ready]]:
        return self._call("begin_push", start)

    def join_group(self, rendezvous: Rendezvous) -> list[PlainCall[None]]:
        return self._call("join_group", rendezvous)

    def load_bucket(self, bucket: OfferedBucket) -> list[PlainCall[None]]:
        return self._call("load_bucket", bucket)

    def finish_push(self, manifest: Manifest) -> list[PlainCall[Manifest]]:
        return self._call("finish_push", manifest)

    def hold(
        self, *pushes: WeightSnapshot, in_flight: InFlight | None = None
    ) -> list[PlainCall[None]]:
        return self._call("hold", *pushes, in_flight=in_flight)

    def pinned(self) -> PlainHandle:
        return self

    def require(self, method: str | None, *args: object) -> None:
        pass
