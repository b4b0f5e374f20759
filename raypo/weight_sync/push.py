"""Step 6: push the learner's weights or adapter to all engines, verify them, and probe them.

Concurrency. All learner workers call the functions together. Rank 0 calls the engines; the others
take part in gathering the tensors. An attempt is one `Transport.push` (see the drawing there).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import ray.util
import torch
from torch import Tensor

from raypo.cluster.actors import ReplicaLost, survivors
from raypo.collectives import Workers
from raypo.config import ConfigError, EngineSection, InFlight
from raypo.serving.client import Engines
from raypo.weight_sync.broadcast import BroadcastTransport
from raypo.weight_sync.ipc import IpcTransport
from raypo.weight_sync.object_store import ObjectTransport
from raypo.weight_sync.probe import Probe, ProbedLearner, try_probe
from raypo.weight_sync.transport import Transport
from raypo.weights.adapter import AdapterPush
from raypo.weights.store import WeightSnapshot

RETRY_S = 0.2


class PushedLearner(ProbedLearner, Protocol):
    """A learner whose weights can be pushed."""

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by their checkpoint names; all workers iterate together."""
        ...


class AdaptedLearner(ProbedLearner, Protocol):
    """A learner whose LoRA adapter can be pushed."""

    def adapter_push(self, name: str, version: int) -> AdapterPush | None:
        """Return the current adapter on rank 0, None elsewhere; all workers call it."""
        ...

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base weights, without the adapter; all workers iterate together."""
        ...


def open_transport(
    section: EngineSection,
    *,
    colocated: bool,
    share_gpus: bool = False,
    kept: bool = False,
    in_flight: InFlight | None = None,
) -> Transport:
    """Return the transport of `rollout.engine.transport` on this learner worker.

    Args:
        section: The section `rollout.engine` of the config.
        colocated: Whether the engines are on the learner workers' devices.
        share_gpus: Whether several engines share a GPU.
        kept: Whether the weights are pushed once, and must stay available for engines that
            restart later.
        in_flight: Handling of requests in flight during a push. None means there are none.

    Raises:
        ConfigError: the configured transport does not work here.
    """
    if kept and section.transport not in ("auto", "object"):
        raise ConfigError(
            f"rollout.engine.transport ({section.transport}): keeps nothing for engines that are "
            "started later, and model.lora.push: adapter sends the base once. Set "
            "rollout.engine.transport to auto or object, or model.lora.push to merged."
        )
    if kept:
        return ObjectTransport(in_flight=in_flight)
    kind = section.resolved_transport(
        colocated=colocated, use_gpu=torch.cuda.is_available(), share_gpus=share_gpus
    )
    if kind == "object":
        return ObjectTransport(in_flight=in_flight)
    device = torch.device("cuda", torch.cuda.current_device())
    if kind == "ipc":
        return IpcTransport(device, in_flight=in_flight)
    return BroadcastTransport(
        backend="nccl",
        device=device,
        host=ray.util.get_node_ip_address(),
        timeout_s=section.push_timeout_s,
        in_flight=in_flight,
    )


def push_weights(
    learner: PushedLearner,
    engine: Engines,
    *,
    version: int,
    transport: Transport,
    probe: Probe,
    workers: Workers,
    on_arrival: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Push the learner's weights to all engines and probe them. All workers call it together.

    If an engine is lost during the push, the push is repeated to the engines that are up then.
    Afterwards each request of `engine` requires the pushed weights, so a restarted engine loads
    them first.

    Args:
        learner: The learner.
        engine: The engines.
        version: Version of the weights.
        transport: Carries the weights.
        probe: Probe to compare engines and learner with.
        workers: The workers that train the policy.
        on_arrival: Called between transfer and probe, to wake the engines.

    Returns:
        `mismatch/probe_gap_max` and `mismatch/probe_gap_mean`, in nats per token.

    Raises:
        WeightError: an engine received other bytes than were sent, or its log-probs differ from
            the learner's. No engine serves a version that it has not received completely.
    """
    _send(learner.named_weights, engine, version=version, transport=transport, workers=workers)
    on_arrival()
    return try_probe(learner, engine, probe, version, workers)


def _send(
    weights: Callable[[], Iterator[tuple[str, Tensor]]],
    engine: Engines,
    *,
    version: int,
    transport: Transport,
    workers: Workers,
) -> None:
    while True:
        engine.require()
        try:
            transport.push(weights(), engine, version=version, workers=workers)
            break
        except Exception as error:  # all workers fail together
            if not workers.broadcast(isinstance(error, ReplicaLost)):
                raise
            time.sleep(RETRY_S)
    engine.require(workers.broadcast(transport.kept))


def push_adapter(
    learner: AdaptedLearner,
    engine: Engines,
    *,
    name: str,
    version: int,
    transport: ObjectTransport,
    engines_have_base: bool,
    probe: Probe,
    workers: Workers,
    on_arrival: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Push the learner's LoRA adapter to all engines and probe it; see `push_weights`.

    Args:
        learner: The learner.
        engine: The engines.
        name: Name of the adapter on the engines.
        version: Version of the adapter.
        transport: Carries the base weights, and keeps base and adapter for restarted engines.
        engines_have_base: Whether every engine loads the base weights by itself.
        probe: Probe to compare engines and learner with.
        workers: The workers that train the policy.
        on_arrival: Called between transfer and probe, to wake the engines.

    Returns:
        As `push_weights`.
    """
    # Push the base weights at first, and again if the actor that kept them was lost, perhaps
    # together with engines. Probe only once the adapter is there: without it requests would fail.
    kept = transport.kept
    if not engines_have_base and workers.broadcast(kept is None or kept.fetch() is None):
        _send(learner.base_weights, engine, version=version, transport=transport, workers=workers)
    push = learner.adapter_push(name, version)
    required: list[WeightSnapshot] = []
    if push is not None:
        if transport.kept is not None:
            required.append(transport.kept)
        required.append(transport.weight_store.keep(push, id=uuid.uuid4().hex, adapter=name))
        # Engines that are down load it before their next request.
        survivors(engine.hold(*required, in_flight=transport.in_flight))
    engine.require(*workers.broadcast(required))
    on_arrival()
    return try_probe(learner, engine, replace(probe, adapter=name), version, workers)
