"""The transport that a run's weights take."""

from __future__ import annotations

import ray.util
import torch

from raypo.config import ConfigError, EngineSection
from raypo.weights.broadcast import BroadcastTransport
from raypo.weights.ipc import IpcTransport
from raypo.weights.transport import ObjectTransport, Transport


def open_transport(section: EngineSection, *, colocated: bool, kept: bool = False) -> Transport:
    """The transport of `rollout.engine.transport`, on this learner worker.

    Args:
        section: Of the engines.
        colocated: The engines live on the learner workers' devices.
        kept: The weights are pushed once and must stay at hand for engines that start later.

    Raises:
        ConfigError: the one that is set cannot work here.
    """
    if kept and section.transport not in ("auto", "object"):
        raise ConfigError(
            f"rollout.engine.transport ({section.transport}): keeps nothing for engines that are "
            "started later, and model.lora.push: adapter sends the base once. Set "
            "rollout.engine.transport to auto or object, or model.lora.push to merged."
        )
    if kept:
        return ObjectTransport()
    kind = section.resolved_transport(colocated=colocated, use_gpu=torch.cuda.is_available())
    if kind == "object":
        return ObjectTransport()
    device = torch.device("cuda", torch.cuda.current_device())
    if kind == "ipc":
        return IpcTransport(device)
    return BroadcastTransport(
        backend="nccl",
        device=device,
        host=ray.util.get_node_ip_address(),
        timeout_s=section.push_timeout_s,
    )
