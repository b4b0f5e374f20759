"""Checks of a Ray cluster: the machine checks on every node, and comparisons between nodes.

Concurrency. An actor on each node runs the checks of `machine` in threads. It reserves no
resources, so it can start on a busy cluster. The command waits for all actors concurrently, and
kills them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypo.config import AnyConfig, ConfigError
from raypo.config.paths import is_uri
from raypo.doctor.machine_checks import machine_checks
from raypo.doctor.result import PROCESS_LIMIT_S, Result, fault, ok, run_checks, skipped, warning
from raypo.storage.folder import TEMPORARY, existing_parent
from raypo.storage.summary import installed_versions

START_S = 60.0
"""Time limit of the start of a node's actor, which imports raypo."""
CLOCK_S = 1.0
"""Clock difference in seconds above which a warning is given."""
CLOCK_FAULT_S = 300.0
"""Clock difference in seconds above which object stores reject signed requests."""


@dataclass(frozen=True)
class NodeFacts:
    """Versions, clock offset and view of the shared folder, as reported by one node."""

    versions: Mapping[str, str]
    clock_s: float
    """Clock offset from this machine in seconds; positive means ahead."""
    error_s: float
    """Largest error of `clock_s`, in seconds."""
    sees_mark: bool
    """True if the node sees the file that this machine has written below `storage_path`."""


class NodeDoctor:
    """Actor that runs the machine checks on its node."""

    def __init__(self) -> None:
        # Ray hides all GPUs from a process that has reserved none.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)

    def now(self) -> float:
        """Return the time of this node's clock."""
        return time.time()

    def facts(self, mark: str) -> tuple[dict[str, str], bool]:
        """Return the installed versions, and True if the file `mark` exists."""
        return installed_versions(), Path(mark).exists()

    def results(self, config: AnyConfig | None, num_nodes: int, node: str) -> list[Result]:
        """Run the checks of this machine. `node` is its name in the results."""
        address = ray.util.get_node_ip_address()
        return run_checks(machine_checks(config, num_nodes=num_nodes, node=address), node=node)


def check_nodes(config: AnyConfig | None) -> list[Result]:
    """Run the machine checks on each node of the connected cluster, and compare the nodes."""
    if config is not None:  # actors have another working directory
        storage = {"storage_path": config.absolute_storage_path}
        config = config.with_absolute_paths().model_copy(update=storage)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    addresses = [node["NodeManagerAddress"] for node in nodes]
    if len(set(addresses)) < len(nodes):  # several on one machine, as in tests
        addresses = [
            f"{a} ({node['NodeID'][:6]})" for a, node in zip(addresses, nodes, strict=True)
        ]
    actors: list[Any] = [
        ray.remote(NodeDoctor)
        .options(
            num_cpus=0,
            max_concurrency=4,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote()
        for node in nodes
    ]
    try:
        return _check_nodes(config, dict(zip(addresses, actors, strict=True)))
    finally:
        for actor in actors:
            ray.kill(actor)


def _check_nodes(config: AnyConfig | None, actors: Mapping[str, Any]) -> list[Result]:
    results: list[Result] = []
    starts = {address: actor.now.remote() for address, actor in actors.items()}
    ray.wait(list(starts.values()), num_returns=len(starts), timeout=START_S)
    alive: dict[str, Any] = {}
    for address, start in starts.items():
        try:
            ray.get(start, timeout=0)
            alive[address] = actors[address]
        except Exception as error:  # of Ray, or of the import of raypo
            results.append(_dead(address, error))
    pending = {a: actor.results.remote(config, len(actors), a) for a, actor in alive.items()}
    facts: dict[str, NodeFacts] = {}
    with _mark(config) as mark:
        for address, actor in alive.items():
            with suppress(RayError):  # the node's checks report it below
                facts[address] = _facts_of(actor, mark)
    for address, answer in pending.items():
        try:
            results += ray.get(answer, timeout=PROCESS_LIMIT_S + 10.0)
        except RayError as error:
            results.append(_dead(address, error))
    at_uri = config is not None and is_uri(config.storage_path)
    results += [versions_equal(facts), clocks(facts, at_uri=at_uri)]
    if config is not None:
        results.append(shared_folder(facts, config.storage_path))
    return results


def _dead(address: str, error: Exception) -> Result:
    reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return fault(
        f"the node does not answer ({type(error).__name__}: {reason})",
        "Workers of the run could not start there.",
        "Install the same version of raypo there, or look at Ray's logs "
        "(/tmp/ray/session_latest/logs).",
        check="node",
        node=address,
    )


def _facts_of(actor: Any, mark: str) -> NodeFacts:
    # The answer with the shortest round trip has the smallest error.
    trips = []
    for _ in range(5):
        begin = time.time()
        there: Any = ray.get(actor.now.remote(), timeout=PROCESS_LIMIT_S)
        trips.append((time.time() - begin, there - (begin + time.time()) / 2))
    trip_s, ahead_s = min(trips)
    versions, sees_mark = ray.get(actor.facts.remote(mark), timeout=PROCESS_LIMIT_S)
    return NodeFacts(versions, ahead_s, trip_s / 2, sees_mark)


@contextmanager
def _mark(config: AnyConfig | None) -> Iterator[str]:
    """Write a file below `storage_path` that every node should see, and yield its path."""
    if config is None or is_uri(config.storage_path):
        yield ""
        return
    folder = Path(config.absolute_storage_path)
    with suppress(ConfigError):  # the check of storage_path reports it
        folder = existing_parent(folder)
    mark = folder / f"{TEMPORARY}doctor-{os.urandom(8).hex()}"
    with suppress(OSError):
        mark.touch()
    try:
        yield str(mark)
    finally:
        with suppress(OSError):
            mark.unlink()


def versions_equal(facts: Mapping[str, NodeFacts]) -> Result:
    """Compare the versions of Python and of the packages between nodes."""
    names = sorted({name for node in facts.values() for name in node.versions})
    different = []
    for name in names:
        by_version: dict[str, list[str]] = {}
        for address, node in facts.items():
            by_version.setdefault(node.versions.get(name, "none"), []).append(address)
        if len(by_version) > 1:
            words = (f"{version} on {', '.join(nodes)}" for version, nodes in by_version.items())
            different.append(f"{name}: {'; '.join(words)}")
    if different:
        return fault(
            ". ".join(different),
            "Workers with different versions may fail to deserialise each other's objects, or "
            "compute different numbers.",
            "Install the same versions on every node.",
            check="versions",
        )
    first = next(iter(facts.values())).versions if facts else {}
    observed = ", ".join(f"{name} {first[name]}" for name in names)
    return ok(f"{observed}" + (", on every node" if len(facts) > 1 else ""), check="versions")


def clocks(facts: Mapping[str, NodeFacts], *, at_uri: bool) -> Result:
    """Compare the clocks of the nodes with this machine's.

    Args:
        facts: Facts of each node, by address.
        at_uri: True if storage_path is a URI; its requests are signed with the time.
    """
    wrong = {a: node for a, node in facts.items() if abs(node.clock_s) - node.error_s > CLOCK_S}
    if not wrong:
        widest = max((abs(node.clock_s) for node in facts.values()), default=0.0)
        return ok(f"at most {widest:.2g} s apart", check="clocks")
    observed = ", ".join(
        f"{address} is {abs(node.clock_s):.1f} s {'ahead' if node.clock_s > 0 else 'behind'}"
        for address, node in wrong.items()
    )
    far = at_uri and max(abs(node.clock_s) for node in wrong.values()) > CLOCK_FAULT_S
    meaning = (
        "The timeline shows the nodes' phases at wrong times, and `raypo status` shows wrong ages."
    )
    if far:
        meaning = "Object stores reject requests that are signed with a wrong time."
    status = fault if far else warning
    remedy = "Start a time service (chrony or systemd-timesyncd) on these nodes."
    return status(f"clocks differ: {observed}", meaning, remedy, check="clocks")


def shared_folder(facts: Mapping[str, NodeFacts], storage_path: str) -> Result:
    """Check that every node sees the files that this machine writes below `storage_path`."""
    name = "shared storage_path"
    if is_uri(storage_path):
        return skipped("storage_path is a URI", check=name)
    blind = [address for address, node in facts.items() if not node.sees_mark]
    if blind:
        return fault(
            f"{', '.join(blind)} cannot see a file that this machine wrote below storage_path",
            "Checkpoints of the workers on these nodes would be lost.",
            "Set storage_path to a folder that all nodes share, or to a URI.",
            check=name,
        )
    return ok(f"every node sees {storage_path}", check=name)
