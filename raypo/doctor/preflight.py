"""The preflight: which checks are made for a machine, a run or a cluster, and how they are told."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from raypo.cluster.hardware import this_machine
from raypo.config import AnyConfig, ClusterSection, ConfigError, load_run_config
from raypo.doctor.machine import machine_checks
from raypo.doctor.result import STATUSES, Result, ok, refused, run_checks
from raypo.doctor.run_checks import input_checks, reward_check
from raypo.storage.summary import installed_versions

INDENT = " " * 10


def preflight(
    path: Path | None, overrides: Sequence[str], *, cluster: bool, ports: Sequence[int] = ()
) -> list[Result]:
    """Make all checks of a machine, or of a run and the machine or cluster that it would use.

    Args:
        path: Run file. None means the machine or cluster alone.
        overrides: Overrides of the run file.
        cluster: Whether to check every node of the Ray cluster instead of this machine.
        ports: Ports that the user will need on this machine.

    Raises:
        ConfigError: no cluster is named, or it does not answer.
    """
    results: list[Result] = []
    config: AnyConfig | None = None
    if path is not None:
        try:
            config = load_run_config(path, list(overrides))
        except ConfigError as error:
            results.append(dataclasses.replace(refused(error), check="config"))
    section = config.cluster if config else ClusterSection()
    address = section.address or os.environ.get("RAY_ADDRESS")
    if not cluster:
        checks = machine_checks(config, num_nodes=1, ports=ports)
        nodes = [] if address else this_machine()
        if config is not None and path is not None:
            checks += input_checks(config, nodes, is_here=not address)
            checks += reward_check(config, path, overrides)
        versions = ", ".join(f"{name} {number}" for name, number in installed_versions().items())
        return [*results, ok(versions, check="versions"), *run_checks(checks)]
    if not address:
        raise ConfigError(
            "--cluster: no Ray cluster is named. Set RAY_ADDRESS or cluster.address, or leave "
            "--cluster out to check this machine."
        )
    return results + _on_cluster(config, path, overrides, section)


def _on_cluster(
    config: AnyConfig | None, path: Path | None, overrides: Sequence[str], section: ClusterSection
) -> list[Result]:
    import ray

    from raypo.cluster.connect import connect
    from raypo.cluster.resources import cluster_nodes
    from raypo.doctor.node_checks import check_nodes

    with redirect_stdout(sys.stderr):  # it tells which Ray is used
        connected_here = connect(section)
    try:
        results = check_nodes(config)
        if config is not None and path is not None:
            checks = input_checks(config, cluster_nodes(section), is_here=False)
            results += run_checks([*checks, *reward_check(config, path, overrides)])
    finally:
        if connected_here:
            ray.shutdown()
    return results


def as_json(results: Sequence[Result]) -> str:
    """Return results as a JSON list."""
    names = ("check", "status", "found", "meaning", "remedy", "seconds", "node")
    return json.dumps([{name: getattr(r, name) for name in names} for r in results], indent=2)


def lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield a line for each check, faults first. Their meaning and remedy follow in other lines.

    Nodes on which a check found nothing wrong share its line.
    """
    for status in STATUSES:
        by_check: dict[str, list[Result]] = {}
        for result in results:
            if result.status == status:
                is_quiet = status in ("ok", "skipped")
                key = result.check if is_quiet else f"{result.check} {result.node}"
                by_check.setdefault(key, []).append(result)
        for first, *others in by_check.values():
            nodes = f" ({first.node})" if first.node else ""
            nodes = f" ({1 + len(others)} nodes)" if others else nodes
            yield f"{status:<{len(INDENT)}}{first.check}{nodes}: {first.found}"
            yield from (f"{INDENT}{text}" for text in (first.meaning, first.remedy) if text)


def verdict(results: Sequence[Result]) -> str:
    """Return the sentence at the end."""
    faults, warnings = (
        sum(result.status == status for result in results) for status in ("fault", "warning")
    )
    if faults:
        return f"{_count(faults, 'fault')}: a run would fail here."
    if warnings:
        return f"{_count(warnings, 'warning')}: a run can start; read what may go wrong."
    return "nothing is wrong."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"
