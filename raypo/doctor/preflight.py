"""Run the preflight checks of a machine, run or cluster, and format the results."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from raypo.cluster.hardware import this_machine
from raypo.cluster.machine import cluster_address
from raypo.config import AnyConfig, ClusterSection, ConfigError, load_run_config
from raypo.config.passwords import without_passwords
from raypo.doctor.machine_checks import machine_checks
from raypo.doctor.result import STATUSES, Result, ok, refused, run_checks
from raypo.doctor.run_checks import input_checks, reward_check
from raypo.storage.summary import installed_versions

INDENT = " " * 10


def preflight(
    path: Path | None, overrides: Sequence[str], *, cluster: bool, ports: Sequence[int] = ()
) -> list[Result]:
    """Run all checks of this machine or cluster, and of a run if a run file is given.

    Args:
        path: Run file. None means the machine or cluster alone.
        overrides: Overrides of the run file.
        cluster: True to check every node of the Ray cluster instead of this machine.
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
    address, _ = cluster_address(section)
    if not cluster:
        checks = machine_checks(config, num_nodes=1, ports=ports)
        nodes = list if address else this_machine
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

    with redirect_stdout(sys.stderr):  # `connect` prints which Ray it uses
        connected_here = connect(section)
    try:
        results = check_nodes(config)
        if config is not None and path is not None:
            nodes = cluster_nodes(section)
            checks = input_checks(config, lambda: nodes, is_here=False)
            results += run_checks([*checks, *reward_check(config, path, overrides)])
    finally:
        if connected_here:
            ray.shutdown()
    return results


def as_json(results: Sequence[Result]) -> str:
    """Return results as a JSON list."""
    names = ("check", "status", "found", "meaning", "remedy", "seconds", "node")
    told = map(without_secrets, results)
    return json.dumps([{name: getattr(r, name) for name in names} for r in told], indent=2)


def without_secrets(result: Result) -> Result:
    """Return a result without users, passwords and keys in its URIs."""
    names = ("check", "found", "meaning", "remedy")
    texts = {name: without_passwords(getattr(result, name)) for name in names}
    return dataclasses.replace(result, **texts)


def lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield one line per check, faults first, then its meaning and remedy, indented.

    Nodes with ok or skipped share a line.
    """
    for status in STATUSES:
        by_check: dict[str, list[Result]] = {}
        for result in map(without_secrets, results):
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
    """Return the summary line."""
    faults, warnings = (
        sum(result.status == status for result in results) for status in ("fault", "warning")
    )
    if faults:
        return f"{_count(faults, 'fault')}: a run would fail here."
    if warnings:
        return f"{_count(warnings, 'warning')}: a run can start; see the warnings above."
    return "nothing is wrong."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number > 1)}"
