"""Engines for a push, as bare actors: for tests that need no deployment."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from ray.actor import ActorHandle

from raypo.config import InFlight
from raypo.serving.client import Engines
from raypo.weights.manifest import Manifest
from raypo.weights.messages import OfferedBucket, PushStart, Ready, Rendezvous
from raypo.weights.store import WeightSnapshot


class PlainHandle(Engines):
    def __init__(self, actors: dict[str, ActorHandle]) -> None:
        self._actors = actors

    def _call(self, name: str, *args: Any, **kwargs: Any) -> list[Future[Any]]:
        methods = [getattr(actor, name) for actor in self._actors.values()]
        return [method.remote(*args, **kwargs).future() for method in methods]

    def begin_push(self, start: PushStart) -> list[Future[Ready]]:
        return self._call("begin_push", start)

    def join_group(self, rendezvous: Rendezvous) -> list[Future[None]]:
        return self._call("join_group", rendezvous)

    def load_bucket(self, bucket: OfferedBucket) -> list[Future[None]]:
        return self._call("load_bucket", bucket)

    def finish_push(self, manifest: Manifest) -> list[Future[Manifest]]:
        return self._call("finish_push", manifest)

    def hold(
        self, *pushes: WeightSnapshot, in_flight: InFlight | None = None
    ) -> list[Future[None]]:
        return self._call("hold", *pushes, in_flight=in_flight)

    def up(self) -> PlainHandle:
        return self

    def require(self, *pushes: object) -> None:
        pass
