"""Which node each bundle comes to lie on, as Ray's strategies place them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from raypo.config import ConfigError
from raypo.plan.dedicated import DedicatedBundle
from raypo.plan.hardware import Node


def room(node: Node, *, cpus: int, gpus: int) -> int:
    """Bundles of `cpus` and `gpus` that a node holds; what it does not say is enough."""
    by_gpu = node.gpus // gpus if gpus else 10**6
    by_cpu = node.cpus // cpus if node.cpus is not None else 10**6
    return min(by_gpu, by_cpu)


def place(nodes: Sequence[Node], count: int, *, cpus: int, gpus: int, strategy: str) -> list[int]:
    """Index of the node of each bundle.

    Raises:
        ConfigError: they do not fit, with what is asked, what there is, and what to change.
    """
    rooms = [room(node, cpus=cpus, gpus=gpus) for node in nodes]
    order = sorted(range(len(nodes)), key=lambda index: -rooms[index])
    placed: list[int] = []
    if strategy == "STRICT_PACK":
        placed = [order[0]] * min(count, rooms[order[0]])
    elif strategy == "PACK":
        placed = [index for index in order for _ in range(min(count, rooms[index]))][:count]
    else:
        rounds = 1 if strategy == "STRICT_SPREAD" else count
        placed = [i for turn in range(rounds) for i in order if rooms[i] > turn][:count]
    if len(placed) < count:
        raise ConfigError(_refusal(nodes, rooms, count, len(placed), cpus, gpus, strategy))
    return sorted(placed)


def first_workers(num_replicas: int | Literal["auto"], nodes: Sequence[object]) -> list[int]:
    """Rank of the first worker that each colocated replica of a frozen model lies beside.

    Args:
        num_replicas: Spread evenly over the workers; auto: one on each of their nodes.
        nodes: Of each worker, in the order of ranks.
    """
    if num_replicas == "auto":
        return [rank for rank, node in enumerate(nodes) if node not in nodes[:rank]]
    return [number * len(nodes) // num_replicas for number in range(num_replicas)]


def nearest(first: Sequence[int], rank: int) -> int:
    """Number of the replica that a worker asks: the last one that begins at or before it."""
    return max(0, bisect_right(first, rank) - 1)


def place_bundles(
    nodes: Sequence[Node], bundles: Sequence[DedicatedBundle], *, strategy: str
) -> list[int]:
    """Index of the node of each bundle of the dedicated group.

    Raises:
        ConfigError: one does not fit, with what is asked, what there is, and what to change.
    """
    if strategy == "STRICT_PACK":
        for index in range(len(nodes)):
            placed = [index] * len(bundles)
            if all(_fits_on(nodes, bundles, placed)):
                return placed
    placed = []
    for bundle in bundles:
        used = [placed.count(index) for index in range(len(nodes))]
        order = sorted(range(len(nodes)), key=lambda i: used[i] if "SPREAD" in strategy else 0)
        for index in order:
            if strategy == "STRICT_SPREAD" and used[index]:
                continue
            if all(_fits_on(nodes, bundles, [*placed, index])):
                placed.append(index)
                break
        else:
            raise ConfigError(_dedicated_refusal(nodes, bundle, len(placed), strategy))
        if strategy == "STRICT_PACK" and len(set(placed)) > 1:
            raise ConfigError(_dedicated_refusal(nodes, bundle, len(placed) - 1, strategy))
    return placed


def left_of(
    nodes: Sequence[Node], bundles: Sequence[DedicatedBundle], placed: Sequence[int]
) -> list[Node]:
    """The nodes without what these bundles take."""
    left = list(nodes)
    for bundle, index in zip(bundles, placed, strict=False):
        node = left[index]
        cpus = None if node.cpus is None else node.cpus - bundle.cpus
        left[index] = replace(node, cpus=cpus, gpus=node.gpus - bundle.gpus)
    return left


def _fits_on(
    nodes: Sequence[Node], bundles: Sequence[DedicatedBundle], placed: Sequence[int]
) -> list[bool]:
    """Whether each node still holds what would be placed on it."""
    left = left_of(nodes, bundles, placed)
    return [(node.cpus is None or node.cpus >= 0) and node.gpus >= 0 for node in left]


def _dedicated_refusal(
    nodes: Sequence[Node], bundle: DedicatedBundle, fits: int, strategy: str
) -> str:
    there = ", ".join(str(node) for node in nodes[:4]) + (", ..." if len(nodes) > 4 else "")
    return (
        f"placement.mode: the dedicated group asks for {bundle}; under placement.strategy "
        f"{strategy} there is no room for it on {there} after {fits} other bundles. Lower "
        f"rollout.engine.count, set placement.mode to colocated, or use a larger cluster."
    )


def _refusal(
    nodes: Sequence[Node],
    rooms: list[int],
    count: int,
    fits: int,
    cpus: int,
    gpus: int,
    strategy: str,
) -> str:
    bundle = f"{cpus} CPU" + (f" and {gpus} GPU" if gpus else "")
    there = ", ".join(str(node) for node in nodes[:4]) + (", ..." if len(nodes) > 4 else "")
    change = f"Set learner.num_workers to at most {fits}" if fits else "Lower learner.num_workers"
    if cpus > 1 and not fits:
        change = f"Lower learner.cpus_per_worker ({cpus})"
    if strategy.startswith("STRICT") and sum(rooms) >= count:
        change = f"Set placement.strategy to {strategy.removeprefix('STRICT_')}"
    return (
        f"learner.num_workers ({count}): asks for {count} bundles of {bundle}, each on one node; "
        f"under placement.strategy {strategy} there is room for {fits} on {there}. {change}, or "
        f"use a larger cluster."
    )
