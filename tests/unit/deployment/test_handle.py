"""Routing and retries of a handle, with scripted replicas in place of Ray's actors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from raypo.cluster.actors import DeploymentError, NoReplicaLeft, ReplicaLost
from raypo.concurrency import background_future
from raypo.deployment.handle import DeploymentHandle
from raypo.deployment.replica import ReplicaClient
from raypo.deployment.spec import Call, Deployment, Prerequisite, PrerequisiteFailed
from raypo.rollout.engines import PolicyEngines, Pushes
from raypo.serving.client import Completions, EngineClient
from raypo.serving.engine import Engine
from raypo.serving.requests import Completion, SamplingRequest
from raypo.tracking.logs import CONSOLE_KEY

LIMITS = Deployment("raypo:test:engine", object, {}, max_ongoing_requests=2)
PUSH: Any = "a push"


class Scripted(ReplicaClient):
    """Gives the replies of a script, one for each request, then its index."""

    def __init__(self, index: int, *script: Any, limits: Deployment = LIMITS) -> None:
        super().__init__(limits, "raypo", index)
        self.script, self.calls = list(script), list[Call]()

    async def send(self, call: Call, on_partial_result: Any = None) -> Any:
        self.calls.append(call)
        reply = self.script.pop(0) if self.script else self.index
        if isinstance(reply, ActorDiedError):
            self.permanent_error, reply = reply, ReplicaLost("it died")
        if isinstance(reply, RayTaskError):
            raise reply
        if isinstance(reply, float):
            await asyncio.sleep(reply)
        return self._unwrap_reply(reply)


def handle_of(*replicas: ReplicaClient, **limits: Any) -> DeploymentHandle:
    return DeploymentHandle(replace(LIMITS, **limits), replicas)


def load(handle: DeploymentHandle) -> Future[Any]:
    return handle.call(Engine.load_summary)


def test_a_lost_call_is_repeated_under_its_id_by_another_replica():
    first, second = Scripted(0, ReplicaLost("it was killed")), Scripted(1)
    assert load(handle_of(first, second).per_replica()[0]).result(5) == 1
    assert [call.id for call in first.calls] == [call.id for call in second.calls]


def test_a_lost_call_is_repeated_by_the_restarted_replica_if_no_other_can_serve():
    first, second = (
        Scripted(0, ReplicaLost("it was killed"), "restarted"),
        Scripted(1, PrerequisiteFailed("new")),
    )
    assert load(handle_of(first, second).per_replica()[0]).result(5) == "restarted"


def test_the_least_busy_replica_is_called_and_an_own_one_while_it_is_up():
    handle = handle_of(*(Scripted(index) for index in range(3)))
    own = handle.per_replica()[1]
    for replica, num_waiting in zip(handle.replicas, (9, 4, 3), strict=True):
        replica.num_waiting = num_waiting
    assert load(handle).result(5) == 2
    assert load(own).result(5) == 1
    handle.replicas[1].permanent_error = ActorDiedError()
    assert load(own).result(5) == 2


def test_the_caller_has_to_push_again_if_every_replica_is_unprepared():
    handle = handle_of(
        Scripted(0, PrerequisiteFailed("no weights")), Scripted(1, PrerequisiteFailed("neither"))
    )
    with pytest.raises(NoReplicaLeft, match=r"no weights.*push the weights again"):
        load(handle).result(5)


def test_what_a_method_raises_is_not_repeated():
    """Ray gives an error of a method the class of its cause, too."""
    raised = RayTaskError(
        "load", "it has begun no push", ReplicaLost("it has begun no push")
    ).as_instanceof_cause()
    replica = Scripted(0, raised, "repeated")
    with pytest.raises(ReplicaLost, match="it has begun no push"):
        load(handle_of(replica)).result(5)


def test_a_deployment_without_a_replica_is_an_error():
    handle = handle_of(Scripted(0, ActorDiedError()))
    with pytest.raises(DeploymentError, match=r"no replica is left.*max_restarts \(3\)"):
        load(handle).result(5)


def test_a_replica_that_does_not_restart_in_time_is_an_error():
    replicas = (
        Scripted(0, *[ReplicaLost("restarting")] * 9),
        Scripted(1, *[ReplicaLost("restarting")] * 9),
    )
    with pytest.raises(DeploymentError, match=r"engine:0, .*engine:1: not started again in 0.1 s"):
        load(handle_of(*replicas, start_timeout_s=0.1)).result(5)


class Silent(ReplicaClient):
    """Never answers a health check."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(replace(LIMITS, **limits), "raypo", 0)
        self.kills = 0

    def _actor_handle(self) -> Any:
        return SimpleNamespace(status=SimpleNamespace(remote=lambda: asyncio.sleep(60)))

    def _kill(self, reason: str) -> None:
        self.kills += 1


class Dying(ReplicaClient):
    """Answers, is lost for two calls, and answers again."""

    def __init__(self) -> None:
        super().__init__(LIMITS, "raypo", 0)
        gone = ActorUnavailableError("The worker process died (SIGKILL).\nTwenty more lines.", None)
        self.replies = ["first", gone, gone, "again", "and again"]

    def _actor_handle(self) -> Any:
        async def answer(*_: Any) -> str:
            reply = self.replies.pop(0)
            if isinstance(reply, Exception):
                raise reply
            return reply

        return SimpleNamespace(
            call=SimpleNamespace(remote=answer),
            status=SimpleNamespace(remote=lambda: asyncio.sleep(60)),
        )


def test_a_lost_replica_is_told_once_and_when_it_is_back(caplog: pytest.LogCaptureFixture):
    """Ray prints nine lines of its own, and nothing about a restart."""
    handle = handle_of(Dying())
    assert [load(handle).result(5) for _ in range(3)] == ["first", "again", "and again"]
    lost, back = [each for each in caplog.records if hasattr(each, CONSOLE_KEY)]
    assert lost.getMessage() == (
        "engine 0 was lost and is restarted: The actor None is unavailable: The worker process "
        "died (SIGKILL)."
    )
    assert back.getMessage() == "engine 0 is back after 0 s"


def test_a_push_does_not_wait_forever_for_a_replica_that_never_answers():
    handle = handle_of(Silent(), start_timeout_s=0.1, health_check_timeout_s=0.05)
    with pytest.raises(DeploymentError, match=r"engine:0: not started again in 0.1 s"):
        handle.up()


def test_a_replica_that_is_silent_after_a_restart_is_killed_once_it_had_time_to_start():
    silent = Silent(start_timeout_s=0.15)

    def kills_after_a_check() -> int:
        assert not background_future(silent.check_health(0.1, kill_on_timeout=True)).result(5)
        return silent.kills

    assert kills_after_a_check() == 0
    assert [kills_after_a_check() for _ in range(2)][-1] > 0
    waiting = Silent(start_timeout_s=0.0)
    assert not background_future(waiting.check_health(0.1)).result(5)
    assert waiting.kills == 0, "only a caller that waits kills"


def test_the_time_limit_of_a_call_includes_its_retries_and_is_not_the_methods_own():
    handle = handle_of(Scripted(0, ReplicaLost("it was killed"), 10.0), request_timeout_s=0.4)
    with pytest.raises(DeploymentError, match=r"no answer in 0.4 s.*request_timeout_s"):
        load(handle).result(5)

    class Late(Scripted):
        async def send(self, call: Call, on_partial_result: Any = None) -> Any:
            raise TimeoutError("the method's own")

    with pytest.raises(TimeoutError, match="the method's own"):
        load(handle_of(Late(0), request_timeout_s=5.0)).result(5)


def test_requests_to_all_replicas_are_urgent_and_not_repeated():
    handle = handle_of(Scripted(0), Scripted(1, ReplicaLost("it was killed")), Scripted(2))
    EngineClient(handle).require(PUSH)
    first, second, third = handle.call_all(Engine.load_summary)
    assert (first.result(5), third.result(5)) == (0, 2)
    with pytest.raises(ReplicaLost, match="engine:1: it was killed"):
        second.result(5)
    for replica in scripted(handle):
        assert [call.prerequisite for call in replica.calls] == [("hold", (PUSH,))]
        assert [call.is_urgent for call in replica.calls] == [True]


class Controlled(ReplicaClient):
    """Passes control calls on to a function."""

    def __init__(self, function: Any, **limits: Any) -> None:
        super().__init__(replace(LIMITS, **limits), "raypo", 0)
        self._function = function

    def _actor_handle(self) -> Any:
        return SimpleNamespace(control=SimpleNamespace(remote=self._function))


def test_a_control_call_is_sent_once_and_says_which_replica_was_lost():
    received: list[Any] = []

    async def reply(method: str, args: Any, kwargs: Any) -> Any:
        received.append((method, args, kwargs))
        return ReplicaLost("vLLM failed") if len(received) == 2 else "done"

    handle = handle_of(Controlled(reply))
    EngineClient(handle).require(PUSH)
    assert handle.control(Engine.wake_up, "weights")[0].result(5) == "done"
    with pytest.raises(ReplicaLost, match="engine:0: vLLM failed"):
        handle.control(Engine.sleep, before_push=True)[0].result(5)
    assert received == [("wake_up", ("weights",), {}), ("sleep", (), {"before_push": True})]


def test_a_control_call_has_a_time_limit_and_is_withdrawn(monkeypatch: pytest.MonkeyPatch):
    withdrawn: list[Any] = []
    monkeypatch.setattr("ray.cancel", withdrawn.append)
    late = Controlled(lambda *_: asyncio.sleep(60), request_timeout_s=0.1)
    with pytest.raises(DeploymentError, match=r"no answer in 0.1 s.*request_timeout_s"):
        late.control(Engine.resume).result(5)
    assert late.num_waiting == 0
    assert len(withdrawn) == 1


def scripted(handle: DeploymentHandle) -> Sequence[Scripted]:
    return [each for each in handle.replicas if isinstance(each, Scripted)]


def test_a_request_that_is_sent_during_a_push_requires_what_was_pushed():
    """The handles of single engines are made before the push ends."""
    answer = [Completion(np.array([5], np.int32), np.zeros(1, np.float32), "stop", 0)]
    handle = handle_of(Scripted(0, answer), Scripted(1, answer))
    engines, pushes = EngineClient(handle), Pushes()
    required: list[Prerequisite | None] = []
    requests = [SamplingRequest(np.array([5], np.int32), 4, 1.0, seed=n) for n in range(2)]
    asking = PolicyEngines(engines, pushes).per_engine()
    sent: list[Completions] = []
    sampling = threading.Thread(
        target=lambda: sent.extend(
            each.generate([request]) for each, request in zip(asking, requests, strict=True)
        )
    )
    with pushes.push():
        engines.require()
        sampling.start()
        sampling.join(0.05)
        assert not any(each.calls for each in scripted(handle))
        engines.require(PUSH)
    sampling.join(10)
    assert [len(each.result(10)) for each in sent] == [1, 1]
    required = [call.prerequisite for each in scripted(handle) for call in each.calls]
    assert required == [("hold", (PUSH,))] * 2
