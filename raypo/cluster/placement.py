"""What a run asks of the cluster, whether it can be had, and which bundle is whose."""

from __future__ import annotations

from collections.abc import Sequence
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
        raise PlacementError(
            f"{demand.role}: asks for {demand.count} bundles of {words(demand.bundle)}, each on "
            f"one node; under placement.strategy {strategy} the cluster's {_count(len(nodes))} "
            f"have room for {fits}. {demand.remedy}"
        )


def check_together(
    demands: Sequence[Demand], nodes: list[Resources], *, strategy: str = "PACK"
) -> None:
    """Refuse demands that no waiting could meet at the same time; each alone is checked first.

    Raises:
        PlacementError: one alone does not fit, or all together do not; then with a table.
    """
    for demand in demands:
        check_feasible(demand, nodes, strategy=strategy)
    left = [dict(node) for node in nodes]
    for demand in demands:
        if not _take(demand, left, strategy):
            raise PlacementError(_table(demands, nodes, strategy))


def check_group(demands: Sequence[Demand], nodes: list[Resources], *, strategy: str) -> None:
    """Refuse one group of unlike bundles that a strict strategy can never place.

    Raises:
        PlacementError: under STRICT_PACK no node holds them all, under STRICT_SPREAD there are
            fewer nodes than bundles.
    """
    whole: Resources = {}
    for demand in demands:
        for name, amount in demand.bundle.items():
            whole[name] = whole.get(name, 0.0) + demand.count * amount
    count = sum(demand.count for demand in demands)
    if strategy == "STRICT_PACK" and count and not room(whole, nodes, strategy):
        raise PlacementError(_table(demands, nodes, strategy, "the bundles of one group"))
    if strategy == "STRICT_SPREAD" and count > len(nodes):
        raise PlacementError(_table(demands, nodes, strategy, "the bundles of one group"))


def _take(demand: Demand, left: list[Resources], strategy: str) -> bool:
    """Take the bundles out of what is left, as Ray would place them; whether they fit."""
    if room(demand.bundle, left, strategy) < demand.count:
        return False
    order = sorted(left, key=lambda node: -room(demand.bundle, [node], "PACK"))
    missing = demand.count
    while missing:
        for node in order:
            fits = room(demand.bundle, [node], "PACK")
            taken = min(fits, missing, missing if "PACK" in strategy else 1)
            for name, amount in demand.bundle.items():
                node[name] = node.get(name, 0.0) - taken * amount
            missing -= taken
    return True


def _table(
    demands: Sequence[Demand], nodes: list[Resources], strategy: str, what: str = "the groups"
) -> str:
    names = sorted({name for demand in demands for name in demand.bundle})
    rows = [("", "bundles", "each", "in all")]
    for demand in demands:
        whole = {name: amount * demand.count for name, amount in demand.bundle.items()}
        rows.append((demand.role, str(demand.count), words(demand.bundle), words(whole)))
    total = {name: sum(node.get(name, 0.0) for node in nodes) for name in names}
    largest = {name: max(node.get(name, 0.0) for node in nodes) for name in names}
    rows.append((f"the cluster ({_count(len(nodes))})", "", "", words(total)))
    rows.append(("its largest node", "", "", words(largest)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    text = "\n  ".join(line.rstrip() for line in lines)
    remedies = " ".join(dict.fromkeys(demand.remedy for demand in demands))
    return (
        f"placement.mode: {what} do not fit the cluster at the same time under "
        f"placement.strategy {strategy}:\n  {text}\n{remedies}"
    )


def words(resources: Resources) -> str:
    """`1 CPU, 2 GPU`."""
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()))


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


def own_bundle(group: PlacementGroup, *, number: int) -> int:
    """Index of a bundle on this process's node, by the number of this worker there.

    Ray Train sorts its workers after it has made them, so a rank is no bundle index.
    """
    here = ray.get_runtime_context().get_node_id()
    placed = placement_group_table(group)["bundles_to_node_id"]
    return sorted(index for index, node in placed.items() if node == here)[number]


def _count(nodes: int) -> str:
    return "1 node" if nodes == 1 else f"{nodes} nodes"
