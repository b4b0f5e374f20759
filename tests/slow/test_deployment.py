"""Replicas behind a handle on a real Ray: routing, losses, bounds, the life of a deployment."""

import asyncio
import os
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnschedulableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray.util.state import list_actors

from raypo.cluster.actors import DeploymentError, NoReplicaLeft, ReplicaLost
from raypo.deployment.deployment import Deployment, DeploymentHandle, Placement, start_deployment
from tests.integration.deployments import Doubler, Stillborn, done, pids, statuses
from tests.integration.task import own_ray

pytestmark = pytest.mark.usefixtures("local_ray")

Start = Callable[..., DeploymentHandle]


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    handles: list[DeploymentHandle] = []

    def start(num_replicas: int, delays: tuple[float, ...] = (0.0,), **limits: Any):
        name = f"raypo:{request.node.name}:doubler"
        kwargs = {"folder": str(tmp_path), "delays": delays}
        deployment = Deployment(name, Doubler, kwargs, **limits)
        handles.append(start_deployment(deployment, [Placement()] * num_replicas))
        handles[-1].wait(60)
        return handles[-1]

    yield start
    for handle in handles:
        handle.shutdown()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def load(handle: DeploymentHandle) -> int:
    """Calls at all replicas."""
    return sum(status.num_calls for status in statuses(handle))


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


def test_replicas_killed_under_load_lose_no_request_and_answer_none_twice(
    start: Start, tmp_path: Path
):
    handle = start(3, delays=(0.01,), max_restarts=10)
    answers: dict[int, list[int]] = {}

    def ask(client: int) -> None:
        own = pickle.loads(pickle.dumps(handle))
        answers[client] = [own.call(Doubler.double, 1000 * client + i).result() for i in range(60)]

    clients = [threading.Thread(target=ask, args=[client]) for client in range(8)]
    for client in clients:
        client.start()
    killed = set()
    for wanted in (40, 120, 200, 300):
        until(lambda wanted=wanted: len(done(tmp_path)) > wanted)
        victim = pids(handle)[0]
        killed.add(victim)
        kill(victim)
    for client in clients:
        client.join(120)

    for client in range(8):
        assert answers[client] == [2 * (1000 * client + i) for i in range(60)]
    done_by_survivors = [number for number, pid in done(tmp_path) if pid not in killed]
    assert max(Counter(done_by_survivors).values()) == 1
    assert len(killed) == 4
    until(lambda: len(handle.up()) == 3)


def test_awaited_calls_stay_with_their_replica_and_survive_it_without_a_thread_each(
    start: Start, tmp_path: Path
):
    """Also more of them than an actor of Ray's takes in by itself, which then hides its health."""
    handle = start(2, delays=(0.003,), max_restarts=10, health_check_period_s=0.5)
    _, own = handle.per_replica()
    _, second = pids(handle)
    most_threads = 0

    async def ask(number: int) -> int:
        nonlocal most_threads
        answer = await asyncio.wrap_future(own.call(Doubler.double, number))
        most_threads = max(most_threads, threading.active_count())
        return answer

    async def ask_all() -> list[int]:
        return await asyncio.gather(*map(ask, range(1500)))

    before = threading.active_count()
    until_half = threading.Thread(target=lambda: until(lambda: len(done(tmp_path)) > 700))
    until_half.start()
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.extend(asyncio.run(ask_all())))
    asking.start()
    until_half.join()
    assert {pid for _, pid in done(tmp_path)} == {second}
    kill(second)
    asking.join(120)
    assert answers == [2 * number for number in range(1500)]
    assert most_threads < before + 40


def test_an_awaited_call_outlives_a_replica_that_hangs(start: Start):
    handle = start(1, health_check_period_s=0.2, health_check_timeout_s=0.5)
    (pid,) = pids(handle)
    os.kill(pid, signal.SIGSTOP)

    async def ask() -> list[int]:
        (own,) = handle.per_replica()
        return await asyncio.gather(
            *(asyncio.wrap_future(own.call(Doubler.double, number)) for number in range(20))
        )

    assert asyncio.run(ask()) == [2 * number for number in range(20)]
    until(lambda: not is_there(pid))


def test_a_call_that_takes_too_long_is_told(start: Start, tmp_path: Path):
    handle = start(1, request_timeout_s=0.3)
    gate = tmp_path / "gate"
    late = handle.call(Doubler.wait_for, str(gate))
    with pytest.raises(DeploymentError, match=r"doubler: no answer in 0.3 s"):
        late.result()
    gate.touch()
    until(lambda: load(handle) == 0)


def test_errors_of_a_method_are_the_callers(start: Start):
    handle = start(1)
    before = pids(handle)
    with pytest.raises(ValueError, match="a bad request"):
        handle.call(Doubler.fail).result()
    assert pids(handle) == before


def test_a_replica_that_says_it_cannot_go_on_is_started_again(start: Start):
    handle = start(1)
    (before,) = pids(handle)
    with pytest.raises(ReplicaLost, match="the doubler is broken"):
        handle.call_all(Doubler.break_down)[0].result()
    assert handle.call(Doubler.double, 4).result() == 8
    assert pids(handle) != [before]


def test_a_replica_that_hangs_fails_its_health_check(
    start: Start, caplog: pytest.LogCaptureFixture
):
    handle = start(1, health_check_period_s=0.2, health_check_timeout_s=0.5)
    (pid,) = pids(handle)
    os.kill(pid, signal.SIGSTOP)
    assert handle.call(Doubler.double, 3).result(60) == 6
    until(lambda: not is_there(pid))
    text = "doubler 0 was lost and is restarted: no answer to a health check in 0.5 s"
    assert text in caplog.text


def test_a_replica_that_answers_and_does_not_get_on_is_started_again(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    handle = start(1, health_check_period_s=0.2, stall_timeout_s=0.5)
    (before,) = pids(handle)
    (sticks := tmp_path / "sticks").touch()
    assert handle.call(Doubler.get_stuck_once, str(sticks)).result(60) == "done"
    assert pids(handle) != [before]
    assert "doubler 0 was lost and is restarted: it made no progress for" in caplog.text
    assert "(stall_timeout_s: 0.5)" in caplog.text


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_replica_that_was_started_again_first_makes_the_call_that_is_required(start: Start):
    handle = start(2)
    assert [response.result() for response in handle.call_all(Doubler.load, 7)] == [7, 7]
    handle.require(Doubler.hold, 7)
    for pid in pids(handle):
        kill(pid)
    assert handle.call(Doubler.version).result() == 7
    until(lambda: len(handle.up()) == 2)
    other = pickle.loads(pickle.dumps(handle))
    assert [response.result() for response in other.call_all(Doubler.version)] == [7, 7]
    handle.require(Doubler.hold, 8)
    assert other.call(Doubler.version).result() == 7, "what another handle requires is its own"
    assert handle.per_replica()[0].call(Doubler.version).result() == 8


def test_where_none_can_do_what_is_required_the_caller_is_told_to_push_again(start: Start):
    handle = start(2)
    handle.require(Doubler.refuse)
    with pytest.raises(NoReplicaLeft, match=r"nothing is kept.*push the weights again"):
        handle.call(Doubler.version).result()
    assert handle.control(Doubler.load, 7)[0].result() == 7
    handle.require(None)
    assert {response.result() for response in handle.call_all(Doubler.version)} <= {7, None}


def test_a_call_to_all_is_lost_with_its_replica_and_reaches_the_restarted_one(start: Start):
    handle = start(2)
    kill(pids(handle)[1])
    first, second = handle.control(Doubler.load, 4)
    assert first.result() == 4
    with pytest.raises(ReplicaLost, match="doubler:1: the replica was lost"):
        second.result()
    until(lambda: len(handle.up()) == 2)
    assert [response.result() for response in handle.call_all(Doubler.version)] == [4, None]


def test_the_budget_of_restarts_ends_with_the_last_reason(start: Start):
    handle = start(1, max_restarts=1)
    kill(pids(handle)[0])
    kill(handle.call(Doubler.pid).result())
    with pytest.raises(DeploymentError, match=r"max_restarts \(1\)") as caught:
        handle.call(Doubler.double, 1).result()
    assert "doubler:0, was lost: The actor" in str(caught.value)
    assert handle.is_lost()


def test_a_replica_whose_node_is_gone_is_passed_over(start: Start):
    """Ray does not call that the death of an actor, nor what its memory monitor does."""
    handle = start(1)
    gone = NodeAffinitySchedulingStrategy(node_id="0" * 56, soft=False)
    options: dict[str, Any] = {"name": f"{handle.name}:1", "scheduling_strategy": gone}
    lost: Any = ray.remote(Doubler).options(**options).remote("nowhere")
    with pytest.raises(ActorUnschedulableError):
        ray.get(lost.pid.remote())
    both = DeploymentHandle.of(handle.deployment, handle.replicas[0].namespace, 2)
    assert both.per_replica()[1].call(Doubler.double, 2).result() == 4
    assert len(both.up()) == 1


def test_what_a_replica_is_made_from_outlives_several_of_its_lives(start: Start):
    """Ray lets go of a constructor's large arguments before the second restart."""
    handle = start(1, delays=(0.0,) * 200_000)
    for number in range(3):
        kill(handle.call(Doubler.pid).result())
        assert handle.call(Doubler.double, number).result() == 2 * number


def test_a_constructor_that_fails_is_told_at_once(request: pytest.FixtureRequest):
    handle = start_deployment(
        Deployment(f"raypo:{request.node.name}:model", Stillborn, {}), [Placement()]
    )
    with pytest.raises(DeploymentError, match="no such model"):
        handle.wait(60)
    assert handle.is_lost()
    handle.shutdown()


def test_shutting_down_lets_requests_end_and_leaves_nothing(start: Start, tmp_path: Path):
    handle = start(1)
    gate = tmp_path / "gate"
    under_way = handle.call(Doubler.wait_for, str(gate))
    until(lambda: load(handle) == 1)
    threading.Timer(0.3, gate.touch).start()
    handle.shutdown()
    assert under_way.result() == "seen"
    with pytest.raises(DeploymentError, match=r"(?s)no replica is left.*killed by `ray.kill`"):
        handle.call(Doubler.double, 1).result()
    with pytest.raises(DeploymentError, match="no replica is left"):
        pickle.loads(pickle.dumps(handle)).call(Doubler.double, 1).result()

    def is_gone() -> bool:
        actors: list[Any] = list_actors(own_ray(), filters=[("state", "=", "ALIVE")])
        return not any(handle.name in str(actor["name"]) for actor in actors)

    until(is_gone)


def test_names_and_state_stand_in_the_dashboards_actor_table(start: Start):
    handle = start(2)
    all_actors: list[Any] = list_actors(own_ray(), detail=True)
    actors = {a["name"]: a for a in all_actors if handle.name in str(a["name"])}
    assert set(actors) == {f"{handle.name}:0", f"{handle.name}:1"}
    assert actors[f"{handle.name}:0"]["class_name"] == "Doubler"
    assert actors[f"{handle.name}:0"]["repr_name"] == "Doubler(vNone, ready)"
