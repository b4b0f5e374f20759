"""Replicas behind a handle on a real Ray: routing, losses, bounds, the life of a deployment."""

import os
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.state import list_actors

from raypo.cluster.actors import Backpressure, DeploymentError, NoReplicaLeft, ReplicaLost
from raypo.cluster.deployment import Deployment, DeploymentHandle, Place, start_deployment
from tests.integration.deployments import Client, Doubler, Stillborn, done, pids
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
        handles.append(start_deployment(deployment, [Place()] * num_replicas))
        handles[-1].wait(60)
        return handles[-1]

    yield start
    for handle in handles:
        handle.shutdown()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def who_answers(handle: DeploymentHandle) -> int | None:
    """The replica that a request goes to; None where it waits behind another one there."""
    try:
        return handle.pid.remote().result(5)
    except DeploymentError:
        return None


def load(handle: DeploymentHandle) -> int:
    """Requests at all replicas."""
    members = handle._membership().serving
    return sum(ray.get([member.actor.load.remote() for member in members]))


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
        answers[client] = [own.double.remote(1000 * client + i).result() for i in range(60)]

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
    status = handle.status()
    assert status.restarts == 4
    until(lambda: len(handle.pid.on_all()) == 3)
    assert handle.status().state == "healthy"
    assert any(replica.name.endswith("#1") for replica in handle.status().replicas)


def test_many_clients_leave_the_slow_replica_alone(start: Start, tmp_path: Path):
    """8 clients in 8 processes, 4 replicas, one of them 15 times slower."""
    handle = start(4, delays=(0.01, 0.01, 0.01, 0.15))
    client_class: Any = Client
    clients = [client_class.remote(handle) for _ in range(8)]
    numbers = [list(range(100 * client, 100 * client + 40)) for client in range(8)]
    answers = ray.get(
        [client.double.remote(each) for client, each in zip(clients, numbers, strict=True)]
    )
    assert answers == [[2 * number for number in each] for each in numbers]
    delays = [response.result() for response in handle.delay_s.on_all()]
    by_pid = dict(zip(pids(handle), delays, strict=True))
    counts = Counter(pid for _, pid in done(tmp_path))
    slow = sum(count for pid, count in counts.items() if by_pid[pid] > 0.1)
    fast = [count for pid, count in counts.items() if by_pid[pid] < 0.1]
    assert len(fast) == 3
    assert slow < 0.5 * min(fast)


def test_the_own_replica_comes_first_and_others_when_it_is_full_or_gone(
    start: Start, tmp_path: Path
):
    handle = start(2, max_restarts=0)
    own = handle.preferring(1)
    first, second = pids(handle)
    assert {own.pid.remote().result() for _ in range(10)} == {second}

    gate = tmp_path / "gate"
    busy = own.wait_for.remote(str(gate))
    until(lambda: who_answers(own) == first)
    gate.touch()
    assert busy.result() == "seen"
    until(lambda: who_answers(own) == second)

    kill(second)
    assert {own.pid.remote().result() for _ in range(10)} == {first}


def test_full_queues_refuse_with_the_key(start: Start, tmp_path: Path):
    handle = start(2, max_queued_requests=1)
    gate = tmp_path / "gate"
    under_way = []
    for count in range(1, 5):  # one that is worked on and one that waits, at each replica
        under_way.append(handle.wait_for.remote(str(gate)))
        until(lambda count=count: load(handle) == count)
    refused = handle.wait_for.remote(str(gate))
    with pytest.raises(Backpressure, match=r"queues of all 2 replicas are full \(max_queued_req"):
        refused.result()
    assert len(handle.pid.on_all()) == 2  # what all are asked does not stand in line

    waiting = pickle.loads(pickle.dumps(handle.waiting_for_room().preferring(1)))
    patient = waiting.wait_for.remote(str(gate))
    with pytest.raises(DeploymentError, match="no answer in 1 s"):
        patient.result(1.0)
    gate.touch()
    assert [response.result() for response in (*under_way, patient)] == ["seen"] * 5


def test_a_call_that_takes_too_long_is_told(start: Start, tmp_path: Path):
    handle = start(1, request_timeout_s=0.3)
    gate = tmp_path / "gate"
    late = handle.wait_for.remote(str(gate))
    with pytest.raises(DeploymentError, match=r"doubler:0: no answer in 0.3 s"):
        late.result()
    gate.touch()
    assert late.result(10) == "seen"


def test_errors_of_a_method_are_the_callers(start: Start):
    handle = start(1)
    before = pids(handle)
    with pytest.raises(ValueError, match="a bad request"):
        handle.fail.remote().result()
    assert pids(handle) == before


def test_a_replica_that_says_it_cannot_go_on_is_replaced(start: Start):
    handle = start(1)
    (before,) = pids(handle)
    with pytest.raises(ReplicaLost, match="the doubler is broken"):
        handle.break_down.on_all()[0].result()
    until(lambda: who_answers(handle) not in (None, before))  # it answers until it is replaced
    assert handle.double.remote(4).result() == 8
    assert "the doubler is broken" in handle.status().replicas[0].reason


def test_a_replica_that_hangs_fails_its_health_check(start: Start):
    handle = start(1, health_check_period_s=0.2, health_check_timeout_s=0.5)
    (pid,) = pids(handle)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert handle.double.remote(3).result(60) == 6
    finally:
        with suppress(ProcessLookupError):
            kill(pid)
    assert "no answer to a health check in 0.5 s" in handle.status().replicas[0].reason


def test_a_replacement_makes_the_call_that_all_have_made_before_it_serves(start: Start):
    handle = start(2)
    assert sorted(handle.establish("load", 7).values()) == [7, 7]
    for pid in pids(handle):
        kill(pid)
    assert handle.version.remote().result() == 7
    until(lambda: len(handle.pid.on_all()) == 2)
    assert [response.result() for response in handle.version.on_all()] == [7, 7]


def test_a_replacement_makes_the_calls_of_all_owners_that_are_left(start: Start):
    handle = start(1)
    one, two = (handle.owned_by(name) for name in ("one", "two"))
    one.establish("load", 7)
    two.establish("note", "hello")
    first = pids(handle)[0]
    kill(first)
    assert handle.version.remote().result() == 7
    assert handle.noted.remote().result() == ["hello"]
    one.withdraw()
    with pytest.raises(ValueError, match="a bad request"):
        handle.owned_by("three").establish("fail")
    kill(pids(handle)[0])
    assert handle.noted.remote().result() == ["hello"]
    assert handle.version.remote().result() is None


def test_without_the_kept_call_a_replacement_waits_for_the_next_one(start: Start):
    handle = start(1)
    handle.establish("load", 7, kept=False)
    kill(pids(handle)[0])
    with pytest.raises(NoReplicaLeft, match="push the weights again"):
        handle.version.remote().result()
    until(lambda: handle.status().replicas[0].state == "waiting")
    assert list(handle.establish("load", 7).values()) == [7]
    assert handle.version.remote().result() == 7


def test_a_conversation_with_all_counts_for_those_that_heard_it_to_its_end(start: Start):
    handle = start(2)
    replicas = handle.pinned()
    assert [response.result() for response in replicas.load.on_all(3)] == [3, 3]
    kill(pids(handle)[1])
    first, second = replicas.load.on_all(4)
    assert first.result() == 4
    with pytest.raises(ReplicaLost, match="doubler:1: the replica was lost"):
        second.result()
    assert isinstance(second.failure(), ReplicaLost)
    assert first.failure() is None
    left = handle.pinned()
    assert left.names == [first.name]
    assert [response.result() for response in left.load.on_all(4)] == [4]
    handle.establish("load", 4, made_by=left.names)
    until(lambda: len(handle.pid.on_all()) == 2)
    assert [response.result() for response in handle.version.on_all()] == [4, 4]


def test_a_replacement_that_hangs_before_it_serves_is_replaced_too(start: Start, tmp_path: Path):
    handle = start(1, health_check_period_s=0.5, health_check_timeout_s=2.0)
    marker = tmp_path / "hang"
    handle.establish("hang_once", str(marker))
    marker.touch()
    kill(pids(handle)[0])
    assert handle.double.remote(4).result(60) == 8
    assert handle.status().replicas[0].name.endswith("#2")
    assert not marker.exists()


def test_a_replacement_that_does_not_start_in_time_is_lost(start: Start):
    handle = start(1, max_restarts=1, start_timeout_s=0.01)
    kill(pids(handle)[0])
    with pytest.raises(DeploymentError, match=r"not started in 0.01 s \(placement.timeout_s\)"):
        handle.double.remote(1).result(60)


def test_the_budget_of_restarts_ends_with_the_last_reason(start: Start):
    handle = start(1, max_restarts=1)
    for _ in range(2):
        kill(pids(handle)[0])
        until(lambda: handle.status().replicas[0].state != "serving")
        until(lambda: handle.status().replicas[0].state in ("serving", "lost"))
    with pytest.raises(DeploymentError, match=r"max_restarts \(1\) have been replaced") as caught:
        handle.double.remote(1).result()
    assert "doubler:0#1, was lost" in str(caught.value)
    assert handle.status().state == "failed"


def test_a_constructor_that_fails_is_told_at_once(request: pytest.FixtureRequest):
    handle = start_deployment(
        Deployment(f"raypo:{request.node.name}:model", Stillborn, {}), [Place()]
    )
    with pytest.raises(DeploymentError, match="no such model"):
        handle.wait(60)
    assert handle.status().restarts == 0
    handle.shutdown()


def test_shutting_down_lets_requests_end_and_leaves_nothing(start: Start, tmp_path: Path):
    handle = start(1)
    gate = tmp_path / "gate"
    under_way = handle.wait_for.remote(str(gate))
    until(lambda: load(handle) == 1)
    threading.Timer(0.3, gate.touch).start()
    handle.shutdown()
    assert under_way.result() == "seen"
    with pytest.raises(DeploymentError, match="the deployment is gone"):
        handle.double.remote(1)

    def is_gone() -> bool:
        actors: list[Any] = list_actors(own_ray(), filters=[("state", "=", "ALIVE")])
        return not any(handle.name in str(actor["name"]) for actor in actors)

    until(is_gone)


def test_names_and_state_stand_in_the_dashboards_actor_table(start: Start):
    handle = start(2)
    all_actors: list[Any] = list_actors(own_ray(), detail=True)
    actors = {a["name"]: a for a in all_actors if handle.name in str(a["name"])}
    assert set(actors) == {handle.name, f"{handle.name}:0", f"{handle.name}:1"}
    assert actors[f"{handle.name}:0"]["class_name"] == "Doubler"
    assert actors[f"{handle.name}:0"]["repr_name"] == "Doubler(vNone, ready)"
    status = handle.status()
    assert (status.state, [replica.state for replica in status.replicas]) == (
        "healthy",
        ["serving", "serving"],
    )
