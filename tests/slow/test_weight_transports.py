"""Weights to two real engines in processes of their own, by every transport that runs here."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import ray
import torch
from ray import exceptions
from transformers import AutoModelForCausalLM

from raypo.collectives import Workers
from raypo.serving.engine import Engine
from raypo.serving.requests import Completion, SamplingRequest
from raypo.weight_sync.broadcast import BroadcastTransport
from raypo.weight_sync.transport import NamedTensors, ObjectTransport, Transport
from raypo.weights.manifest import WeightError
from tests.integration.plain_handle import plain_client
from tests.integration.test_engine import (
    AGREES,
    MAX_MODEL_LEN,
    PROMPTS,
    SECTION,
    disturb,
    gap,
    probes,
    requests,
    weights,
)
from tests.slow.test_deployment import until
from tests.stand_ins import generate
from tests.tiny import tiny_policy

BUCKET_BYTES = 100_000
LIMIT_S = 20.0


def by_object_store() -> Transport:
    return ObjectTransport(bucket_bytes=BUCKET_BYTES)


def by_broadcast() -> BroadcastTransport:
    return BroadcastTransport(
        backend="gloo",
        device="cpu",
        host=ray.util.get_node_ip_address(),
        timeout_s=LIMIT_S,
        bucket_bytes=BUCKET_BYTES,
    )


TRANSPORTS = pytest.mark.parametrize("make", [by_object_store, by_broadcast])


class Replica(Engine):
    """An engine that says which process it is."""

    def pid(self) -> int:
        return os.getpid()

    def generate(self, requests: list[SamplingRequest]) -> list[Completion]:
        return generate(self, requests)


def start(folder: str) -> Any:
    return (
        ray.remote(Replica)
        .options(num_cpus=0, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
        .remote(folder, section=SECTION, dtype="float32", max_model_len=MAX_MODEL_LEN)
    )


@dataclass
class Fleet:
    """Two engines and the tied model whose weights they are given."""

    folder: str
    learner: Any
    replicas: dict[str, Any]
    version: int = 0

    def push(self, transport: Transport, tensors: NamedTensors | None = None) -> None:
        """A large change of all weights, and its way to the engines."""
        self.version += 1
        disturb(self.learner)
        sent = weights(self.learner).items() if tensors is None else tensors
        client = plain_client(self.replicas)
        transport.push(lambda: sent, client, version=self.version, workers=Workers())

    def renew(self, name: str) -> Any:
        """A new engine, without weights, in the place of one."""
        ray.kill(self.replicas[name])
        self.replicas[name] = start(self.folder)
        return self.replicas[name]

    def agree(self) -> bool:
        answers = [ray.get(a.generate.remote(probes(PROMPTS, 40))) for a in self.replicas.values()]
        assert {c.weight_version for answer in answers for c in answer} == {self.version}
        return all(gap(self.learner, answer) < AGREES for answer in answers)

    def refuse(self) -> bool:
        """Whether no engine samples; an assertion tells which one does."""
        for actor in self.replicas.values():
            with pytest.raises(RuntimeError, match=f"push of version {self.version} failed"):
                ray.get(actor.generate.remote(requests(1)))
        return True


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> Iterator[Fleet]:
    folder = str(tiny_policy(tmp_path_factory.mktemp("tied")))
    learner = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(5)
    fleet = Fleet(folder, learner, {"engine:0": start(folder), "engine:1": start(folder)})
    yield fleet
    for actor in fleet.replicas.values():
        ray.kill(actor)


@TRANSPORTS
def test_engines_agree_with_the_learner_after_large_changes(
    fleet: Fleet, make: Callable[[], Transport]
):
    transport = make()
    for _ in range(2):
        fleet.push(transport)
        assert fleet.agree()


def cut_off(learner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A sender that breaks after half of its tensors."""
    named = list(weights(learner).items())
    yield from named[: len(named) // 2]
    raise ValueError("the sender broke")


@TRANSPORTS
def test_no_engine_serves_after_a_push_that_broke_off(fleet: Fleet, make: Callable[[], Transport]):
    transport = make()
    fleet.push(transport)
    with pytest.raises(ValueError, match="the sender broke"):
        fleet.push(transport, cut_off(fleet.learner))
    assert fleet.refuse()
    fleet.push(transport)
    assert fleet.agree()


@TRANSPORTS
def test_no_engine_serves_after_its_sender_was_killed(fleet: Fleet, make: Callable[[], Transport]):
    fleet.push(make())
    fleet.version += 1

    def push_and_die(learner: Any, replicas: dict[str, Any], version: int) -> None:
        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            named = list(weights(learner).items())
            yield from named[: len(named) // 2]
            os.kill(os.getpid(), signal.SIGKILL)

        make().push(tensors, plain_client(replicas), version=version, workers=Workers())

    sender = ray.remote(push_and_die).options(num_cpus=0, max_retries=0)
    with pytest.raises(exceptions.WorkerCrashedError):
        ray.get(sender.remote(fleet.learner, fleet.replicas, fleet.version))
    assert fleet.refuse()
    fleet.push(make())
    assert fleet.agree()


def test_kept_buckets_bring_a_new_engine_to_the_same_version(fleet: Fleet):
    transport = ObjectTransport(bucket_bytes=BUCKET_BYTES)
    fleet.push(transport)
    second = fleet.renew("engine:1")
    assert transport.last_push is not None
    assert len(transport.last_push.fetch().buckets) > 2
    for _ in range(2):  # the second time there is nothing to do
        ray.get(second.hold.remote(transport.last_push))
    assert fleet.agree()


def test_a_store_that_was_lost_comes_back_empty_and_is_filled_by_the_next_push(fleet: Fleet):
    transport = ObjectTransport(bucket_bytes=BUCKET_BYTES)
    fleet.push(transport)
    before = transport.last_push
    assert before is not None
    assert before.store is not None
    ray.kill(ray.get_actor(before.store), no_restart=False)
    until(lambda: before.fetch() is None)
    ray.get(fleet.replicas["engine:1"].hold.remote(before))  # it has these
    second = fleet.renew("engine:1")
    with pytest.raises(WeightError, match="no copy of them is stored"):
        ray.get(second.hold.remote(before))
    fleet.push(transport)
    assert transport.last_push is not None
    assert transport.last_push.fetch().version == fleet.version
    assert fleet.agree()


def test_survivors_refuse_a_push_in_which_one_died_and_the_next_group_is_whole(fleet: Fleet):
    transport = by_broadcast()
    fleet.push(transport)
    lost = fleet.replicas["engine:1"]
    pid: Any = ray.get(lost.pid.remote())

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        named = list(weights(fleet.learner).items())
        yield from named[: len(named) // 2]
        os.kill(pid, signal.SIGKILL)
        yield from named[len(named) // 2 :]

    with pytest.raises((WeightError, exceptions.RayError, RuntimeError)):
        fleet.push(transport, tensors())
    del fleet.replicas["engine:1"]
    assert fleet.refuse()

    fleet.push(transport)  # the survivor alone
    assert fleet.agree()
    fleet.replicas["engine:1"] = start(fleet.folder)
    fleet.push(transport)  # with a replacement
    assert fleet.agree()
    assert transport._group is not None
    assert transport._group.rendezvous.epoch == 3
    assert transport._group.rendezvous.size == 3
