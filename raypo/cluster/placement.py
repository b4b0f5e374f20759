"""What a run asks of the cluster, whether it can be had, and which bundle is whose."""

from __future__ import annotations

from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table

from raypo.config import ConfigError

Resources = dict[str, float]


class PlacementError(ConfigError):
    """The cluster can never hold what the run asks for."""


@dataclass(frozen=True)
class Demand:
    """Bundles that must exist at the same time."""

    role: str
    bundle: Resources
    count: int
    remedy: str
    """Which key to lower."""


def check_feasible(demand: Demand, nodes: list[Resources], *, strategy: str = "PACK") -> None:
    """Refuse a demand that no waiting could ever meet; Ray itself would wait for ever.

    Args:
        demand: Bundles of one kind.
        nodes: Resources of each node that is alive, busy or not.
        strategy: Ray's placement strategy.

    Raises:
        PlacementError: the nodes together, or the largest of them, are too small, or the bundles
            do not fit onto them under the strategy.
    """
    for name, each in sorted(demand.bundle.items()):
        total = sum(node.get(name, 0.0) for node in nodes)
        largest = max((node.get(name, 0.0) for node in nodes), default=0.0)
        asked = each * demand.count
        if asked <= total and each <= largest:
            continue
        raise PlacementError(
            f"{demand.role}: asks for {demand.count} x {each:g} {name} = {asked:g} {name}; the "
            f"cluster has {total:g} {name} on {_count(len(nodes))}, the largest has {largest:g}. "
            f"{demand.remedy}"
        )

    fits = room(demand.bundle, nodes, strategy)
    if fits < demand.count:
        bundle = ", ".join(f"{amount:g} {name}" for name, amount in sorted(demand.bundle.items()))
        raise PlacementError(
            f"{demand.role}: asks for {demand.count} bundles of {bundle}, each on one node; under "
            f"placement.strategy {strategy} the cluster's {_count(len(nodes))} have room for "
            f"{fits}. {demand.remedy}"
        )


def room(bundle: Resources, nodes: list[Resources], strategy: str) -> int:
    """How many equal bundles the nodes hold under a placement strategy."""
    by_node = [
        min(int(node.get(name, 0.0) / each + 1e-9) for name, each in bundle.items())
        for node in nodes
    ]
    if strategy == "STRICT_PACK":
        return max(by_node, default=0)
    return sum(min(room, 1) if strategy == "STRICT_SPREAD" else room for room in by_node)


def alive_nodes() -> list[Resources]:
    """Resources of the nodes of the connected cluster."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def own_bundle(group: PlacementGroup, *, local_rank: int) -> int:
    """Index of a bundle on this process's node: the n-th there for local rank n.

    Ray Train sorts its workers after it has made them, so a rank is no bundle index.
    """
    here = ray.get_runtime_context().get_node_id()
    placed = placement_group_table(group)["bundles_to_node_id"]
    return sorted(index for index, node in placed.items() if node == here)[local_rank]


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"
