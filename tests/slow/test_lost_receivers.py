"""Pushes during which a replica dies: they go on with those that are left, or the next ones."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from raypo.cluster.actors import DeploymentError, ReplicaLost
from raypo.collectives import Workers
from raypo.concurrency import daemon_future
from raypo.deployment.deployment import Deployment, DeploymentHandle, Placement, start_deployment
from raypo.rollout.collect import Sampler, Sampling
from raypo.rollout.engines import PolicyEngines, Pushes
from raypo.serving.client import EngineClient
from raypo.types import Experience, Prompt, Rollout
from raypo.weight_sync.broadcast import BroadcastTransport
from raypo.weight_sync.probe import Probe, try_probe
from raypo.weight_sync.push import push_adapter
from raypo.weight_sync.transport import ObjectTransport, Transport
from raypo.weights.adapter import AdapterPush
from tests.integration.deployments import Receiver, statuses
from tests.slow.test_deployment import until
from tests.stand_ins import Lossy

pytestmark = pytest.mark.usefixtures("local_ray")

LIMIT_S = 20.0
DRAWS = [Prompt(i, "1+1=", np.array([3, 4], dtype=np.int32), group_index=i) for i in range(3)]
SAMPLING = Sampling(2, 1, temperature=1.0, top_p=1.0, stop_token_ids=(), seed=0)
PROBE = Probe([np.array([3, 4])], max_new_tokens=1, temperature=1.0, dtype="float32", seed=0)


def transport_of(kind: str) -> Transport:
    if kind == "object":
        return ObjectTransport(bucket_bytes=100)
    return BroadcastTransport(
        backend="gloo",
        device="cpu",
        host=ray.util.get_node_ip_address(),
        timeout_s=LIMIT_S,
        bucket_bytes=100,
    )


@dataclass
class Learner:
    """Has weights, and the receivers' opinion of what is sampled with them."""

    weights: dict[str, torch.Tensor]

    def base_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()

    def adapter_push(self, name: str, version: int) -> AdapterPush:
        return AdapterPush.of(name, version, {}, {"lora": torch.zeros(2)})

    def log_probs(self, experience: Experience) -> torch.Tensor:
        return torch.zeros_like(experience.rollout_log_probs)


class Fleet:
    """Receivers in a deployment, and what is pushed to them."""

    def __init__(self, name: str, dies: Path, count: int, **limits: Any) -> None:
        self.dies, self.count = dies, count
        deployment = Deployment(f"raypo:{name}:engine", Receiver, {"dies": str(dies)}, **limits)
        self.handle: DeploymentHandle = start_deployment(deployment, [Placement()] * count)
        self.handle.wait(60)

    def push(self, transport: Transport, version: int) -> float:
        """The sum over the weights that were pushed."""
        weights = {f"w{i}": torch.randn(20) for i in range(6)}
        client = EngineClient(self.handle)
        transport.push(weights.items, client, version=version, workers=Workers())
        try_probe(Learner(weights), client, PROBE, version, Workers())
        return float(sum(w.sum() for w in weights.values()))

    def held(self) -> list[tuple[int | None, float]]:
        """By those that hold something, or can load it."""
        answers = []
        for response in self.handle.call_all(Receiver.held):
            with suppress(ReplicaLost):
                answers.append(response.result())
        return answers


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(request.node.name, tmp_path / "dies", **request.param)
    yield made
    made.handle.shutdown()


@pytest.mark.parametrize("kind", ["object", "gloo"])
@pytest.mark.parametrize("fleet", [{"count": 1}, {"count": 2}], indirect=True, ids=["one", "two"])
def test_a_push_outlives_a_replica(fleet: Fleet, kind: str):
    transport = transport_of(kind)
    before = fleet.push(transport, 1)
    assert fleet.held() == [(1, before)] * fleet.count

    fleet.dies.touch()
    after = fleet.push(transport, 2)

    assert not fleet.dies.exists(), "nobody died"
    assert set(fleet.held()) == {(2, after)}
    until(lambda: len(fleet.handle.up()) == fleet.count)
    assert set(fleet.held()) == {(2, after)}
    if kind == "object":  # its buckets are kept for the one that was started again
        assert len(fleet.held()) == fleet.count
    last = fleet.push(transport, 3)
    assert fleet.held() == [(3, last)] * fleet.count


@pytest.mark.parametrize("kind", ["object", "gloo"])
@pytest.mark.parametrize("fleet", [{"count": 1}, {"count": 2}], indirect=True, ids=["one", "two"])
def test_a_rollout_outlives_a_replica(fleet: Fleet, kind: str):
    """Survivors, or kept buckets, or where there is neither one more push."""
    transport = transport_of(kind)
    fleet.push(transport, 1)
    pushes, num_pushes = Pushes(), 0
    fleet.dies.touch()
    sampler = Sampler(PolicyEngines(EngineClient(fleet.handle), pushes), Lossy(), SAMPLING)
    sampled = daemon_future(lambda: sampler.sample(DRAWS), name="sampling")
    while not pushes.wait_for(sampled, may_push=True):
        with pushes.push():
            fleet.push(transport, 1)
        num_pushes += 1

    assert not fleet.dies.exists(), "nobody died"
    assert [rollout.weight_version for rollout in sampled.result()] == [1] * 6
    assert num_pushes == (1 if kind == "gloo" and fleet.count == 1 else 0)


@pytest.mark.parametrize(
    "fleet", [{"count": 2, "max_ongoing_requests": 4}], indirect=True, ids=["two"]
)
def test_requests_in_flight_outlive_all_engines_after_a_push(fleet: Fleet):
    """They were asked for before it: what they required then is kept no longer."""
    transport, pushes = transport_of("object"), Pushes()
    fleet.push(transport, 1)
    holds_up = fleet.dies.with_name("holds_up")
    holds_up.touch()
    engines = PolicyEngines(EngineClient(fleet.handle), pushes, joins=True)
    rollouts: list[Rollout] = []
    sampling = threading.Thread(
        target=lambda: rollouts.extend(Sampler(engines, Lossy(), SAMPLING).sample(DRAWS)),
        daemon=True,
    )
    sampling.start()
    until(lambda: all(status.num_calls for status in statuses(fleet.handle)))
    with pushes.push():
        fleet.push(transport, 2)
    for life in statuses(fleet.handle):
        os.kill(life.pid, signal.SIGKILL)
    holds_up.unlink()
    sampling.join(60)
    assert [rollout.weight_version for rollout in rollouts] == [2] * 6


@pytest.mark.parametrize("fleet", [{"count": 1, "max_restarts": 0}], indirect=True)
def test_a_push_ends_when_no_replica_is_left(fleet: Fleet):
    fleet.dies.touch()
    with pytest.raises(DeploymentError, match=r"max_restarts \(0\)"):
        fleet.push(transport_of("object"), 1)


@pytest.mark.parametrize("fleet", [{"count": 1}], indirect=True)
def test_the_weights_below_an_adapter_are_pushed_again_where_nothing_keeps_them(fleet: Fleet):
    """Engine and store are lost together, before the next adapter is pushed."""
    learner = Learner({"w": torch.randn(20)})
    base = float(learner.weights["w"].sum())
    transport = ObjectTransport(bucket_bytes=100)

    def push(version: int) -> None:
        push_adapter(
            learner,
            EngineClient(fleet.handle),
            name="lora",
            version=version,
            transport=transport,
            engines_have_base=False,
            workers=Workers(),
        )
        ((of_base, total),) = fleet.held()
        assert (of_base, total) == (pushed_with, pytest.approx(base))
        assert fleet.handle.call(Receiver.adapter).result() == version

    pushed_with = 0
    push(0)
    push(1)  # the adapter alone
    assert transport.last_push is not None
    assert transport.last_push.store is not None
    ray.kill(ray.get_actor(transport.last_push.store), no_restart=False)
    os.kill(statuses(fleet.handle)[0].pid, signal.SIGKILL)
    pushed_with = 2
    push(2)
