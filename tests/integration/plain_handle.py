"""Engines as bare Ray actors behind a handle: for tests that need no deployment."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from ray.actor import ActorHandle

from raypo.concurrency import background_future
from raypo.deployment.handle import DeploymentHandle
from raypo.deployment.replica import LocalReplica
from raypo.deployment.spec import Call
from raypo.serving.client import EngineClient


class BareActor(LocalReplica):
    """An actor of the class itself."""

    def control(self, method: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        async def reply() -> Any:
            return await getattr(self._target, method.__name__).remote(*args, **kwargs)

        return background_future(reply())

    async def send(self, call: Call, on_partial_result: Any = None) -> Any:
        return await getattr(self._target, call.method).remote(*call.args, **call.kwargs)


def plain_client(actors: dict[str, ActorHandle]) -> EngineClient:
    replicas = [BareActor(actor, index) for index, actor in enumerate(actors.values())]
    return EngineClient(DeploymentHandle(replicas[0].deployment, replicas))
