"""What a handle requires of replicas holds for all handles that were made from it."""

from __future__ import annotations

import asyncio
import pickle
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorUnavailableError

from raypo.deployment import handle as module
from raypo.deployment.handle import DeploymentHandle
from raypo.deployment.replicas import Replicas
from raypo.deployment.spec import Call, Deployment, Prerequisite
from raypo.rollout.dispatch import dispatch
from raypo.rollout.in_flight import EnginesInFlight, Pushes
from raypo.serving.client import EngineClient
from raypo.serving.engine import Engine
from raypo.serving.requests import SamplingRequest


def handle_of_two() -> DeploymentHandle:
    limits = Deployment("raypo:test:engine", object, {})
    return DeploymentHandle(Replicas(limits, "raypo", 2)).preferring(0, 1)


def test_a_push_reaches_the_handles_of_single_replicas():
    handle = handle_of_two()
    handle.require("hold", 1)
    first, second = handle.per_replica()
    handle.require("hold", 2)
    assert first.required == second.required == handle.required == ("hold", 2)
    elsewhere = pickle.loads(pickle.dumps(first))
    handle.require(None)
    assert first.required == (None,)
    assert elsewhere.required == ("hold", 2), "in another process it is that one's own"


def test_an_event_loop_goes_on_while_no_replica_can_be_asked(monkeypatch: pytest.MonkeyPatch):
    handle, threads = handle_of_two().per_replica()[0], set[int]()
    handle._replicas.note_lost(0, ActorUnavailableError("restarting", None))

    def ask(*_: Any) -> Any:
        threads.add(threading.get_ident())
        return {}, []

    monkeypatch.setattr(handle._replicas, "ask", ask)

    async def asked() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(handle.call_async(Engine.submit, []), 0.3)

    asyncio.run(asked())
    assert threads
    assert threading.get_ident() not in threads


def test_who_asks_during_a_push_requires_what_was_pushed(monkeypatch: pytest.MonkeyPatch):
    """Its handles of single engines were made before the push has come to its end."""
    handle, pushes = handle_of_two(), Pushes()
    asked: list[Prerequisite | None] = []

    def response(replicas: Replicas, call: Call, prefer: Any, **_: bool) -> Any:
        asked.append(call.prerequisite)
        return SimpleNamespace(result=lambda: [SimpleNamespace(finish_reason="stop")])

    monkeypatch.setattr(module, "PendingCall", response)
    requests = [SamplingRequest(np.array([5], np.int32), 4, 1.0, seed=n) for n in range(2)]
    engines = EnginesInFlight(EngineClient(handle), pushes)
    asks = threading.Thread(target=dispatch, args=(requests, engines))
    with pushes.push():
        handle.require(None)
        asks.start()
        asks.join(0.05)
        assert not asked
        handle.require("hold", 2)
    asks.join(10)
    assert asked == [("hold", (2,))] * 2
