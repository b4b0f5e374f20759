"""Nodes of a running cluster, with their resources."""

from __future__ import annotations

import ray

from raypo.cluster.connect import connect
from raypo.cluster.gpus import gpu_of
from raypo.cluster.hardware import GB, Node
from raypo.cluster.placement import LabelledResources, Resources
from raypo.config import ClusterSection


def alive_nodes() -> list[LabelledResources]:
    """Return the resources and labels of each live node in the connected cluster."""
    return [
        LabelledResources(node["Resources"], node["Labels"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def cluster_nodes(section: ClusterSection) -> list[Node]:
    """Return the live nodes of a cluster. Connects only for this query.

    Raises:
        ConfigError: no Ray responds at the address, or it refuses the token.
    """
    connected_here = connect(section)
    try:
        return [
            describe(f"node {index}", resources) for index, resources in enumerate(alive_nodes())
        ]
    finally:
        if connected_here:
            ray.shutdown()


def describe(name: str, resources: Resources) -> Node:
    """Convert a node's resources. Its RAM is the sum of Ray's `memory` and the object store."""
    gpu_kinds = [key.split(":")[1] for key in resources if key.startswith("accelerator_type:")]
    gpu = next(filter(None, map(gpu_of, gpu_kinds)), None)
    ram = resources.get("memory", 0.0) + resources.get("object_store_memory", 0.0)
    return Node(
        name,
        gpus=int(resources.get("GPU", 0.0)),
        gpu_bytes=int(gpu.memory_gb * GB) if gpu else None,
        gpu=gpu,
        cpus=int(resources.get("CPU", 0.0)),
        ram_bytes=int(ram) or None,
        labels=getattr(resources, "labels", None),
    )
