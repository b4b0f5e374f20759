"""Open the transport for a run's weight pushes, and push a LoRA adapter.

Concurrency. All learner workers call `push_adapter` together. Rank 0 calls the engines. The other
ranks only take part in gathering the tensors.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Protocol

import ray.util
import torch
from torch import Tensor

from raypo.cluster.actors import survivors
from raypo.collectives import Workers
from raypo.config import ConfigError, EngineSection, InFlight
from raypo.serving.client import EngineClient
from raypo.serving.engine import Engine
from raypo.weight_sync.broadcast import BroadcastTransport
from raypo.weight_sync.ipc import IpcTransport
from raypo.weight_sync.transport import ObjectTransport, Transport
from raypo.weights.adapter import AdapterPush


class AdaptedLearner(Protocol):
    """A learner whose LoRA adapter can be pushed."""

    def adapter_push(self, name: str, version: int) -> AdapterPush | None:
        """Return the current adapter on rank 0, None elsewhere. All workers call it together."""
        ...

    def base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base weights, without the adapter. All workers iterate together."""
        ...


def open_transport(
    section: EngineSection,
    *,
    colocated: bool,
    share_gpus: bool = False,
    keep_for_restarts: bool = False,
    in_flight: InFlight | None = None,
) -> Transport:
    """Return the transport of `rollout.engine.transport` on this learner worker.

    Args:
        section: The section `rollout.engine` of the config.
        colocated: Whether the engines run on the learner workers' devices.
        share_gpus: Whether several engines share a GPU.
        keep_for_restarts: Whether the weights are pushed only once, and must stay available for
            engines that restart later.
        in_flight: Policy for requests in flight during a push. None means that there are none.

    Raises:
        ConfigError: the configured transport cannot be used here.
    """
    if keep_for_restarts and section.transport not in ("auto", "object"):
        raise ConfigError(
            f"rollout.engine.transport ({section.transport}): keeps no weights for engines that "
            "start later, but model.lora.push: adapter sends the base model only once. Set "
            "rollout.engine.transport to auto or object, or model.lora.push to merged."
        )
    if keep_for_restarts:
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


def push_adapter(
    learner: AdaptedLearner,
    engine: EngineClient,
    *,
    name: str,
    version: int,
    transport: Transport,
    engines_have_base: bool,
    workers: Workers,
) -> None:
    """Push the learner's LoRA adapter to all engines.

    If engines lack the base weights, these are pushed first.

    Args:
        learner: The learner.
        engine: The engines.
        name: Name of the adapter on the engines.
        version: Version of the adapter.
        transport: Transport that sends the base weights. Its store keeps the base weights and the
            adapter for restarted engines.
        engines_have_base: Whether every engine loads the base weights on its own.
        workers: The workers that train the policy.

    Raises:
        WeightError: see `Transport.push`.
    """
    # Push the base weights before the first adapter. Push them again if the store actor was lost,
    # because engines may have been lost with it.
    base_snapshot = transport.last_push
    if not engines_have_base and workers.broadcast(
        base_snapshot is None or base_snapshot.fetch() is None
    ):
        transport.push(learner.base_weights, engine, version=version, workers=workers)
    push = learner.adapter_push(name, version)
    if push is not None:
        adapter_snapshot = transport.weight_store.keep(push, id=uuid.uuid4().hex, adapter=name)
        snapshots = (
            (adapter_snapshot,)
            if transport.last_push is None
            else (transport.last_push, adapter_snapshot)
        )
        # Engines that are down now load the adapter before their next request.
        survivors(engine.handle.control(Engine.hold, *snapshots, in_flight=transport.in_flight))
        engine.require(*snapshots)
