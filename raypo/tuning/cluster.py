"""What the cluster has, asked without starting anything."""

from __future__ import annotations

import ray

from raypo.cluster.connect import cluster_address, connect
from raypo.cluster.resources import alive_nodes
from raypo.config import AnyConfig
from raypo.plan.hardware import this_machine
from raypo.plan.placement import Resources


def find_nodes(base: AnyConfig) -> tuple[list[Resources], bool]:
    """Resources of each node, and whether learner workers take GPUs.

    A Ray that is connected or has an address is asked; else this machine is the only node.
    """
    if ray.is_initialized() or cluster_address(base.cluster)[0]:
        connect(base.cluster)
        nodes = alive_nodes()
    else:
        nodes = [node.resources for node in this_machine()]
    has_gpus = any(node.get("GPU", 0.0) for node in nodes)
    use_gpu = base.learner.use_gpu
    return nodes, has_gpus if use_gpu == "auto" else use_gpu
