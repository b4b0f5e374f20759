"""The checks of one machine, in the order in which they are listed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from raypo.cluster.hardware import this_machine
from raypo.cluster.machine import check_machine, cluster_address
from raypo.config import AnyConfig, ClusterSection
from raypo.doctor import system_checks
from raypo.doctor.disk_checks import disk_checks
from raypo.doctor.gpu_checks import gpu_checks
from raypo.doctor.result import Check, Result, ok
from raypo.doctor.run_checks import checkpoint_bytes
from raypo.doctor.service_checks import service_checks
from raypo.plan.fit import engine_config


def machine_checks(
    config: AnyConfig | None, *, num_nodes: int, node: str = "", ports: Sequence[int] = ()
) -> list[Check]:
    """Return the checks of this machine, with those of the services that it must reach.

    Args:
        config: Config of the run. None means the machine alone.
        num_nodes: Number of nodes.
        node: Ray's address of this node. Empty means that there is no cluster.
        ports: Ports that the user will need.
    """
    section = config.cluster if config else ClusterSection()
    checks = [
        *([] if node else [Check("Ray", partial(_ray, section))]),
        *gpu_checks(config),
        Check("shared memory", partial(_shared_memory, config)),
        Check("gloo's address", partial(system_checks.gloo, num_nodes, node)),
        Check("ports", partial(system_checks.ports, config, ports)),
        Check("open files", system_checks.open_files),
        Check("processes", system_checks.processes),
        Check("compiler", partial(system_checks.compiler, config)),
        Check("sandbox", partial(system_checks.sandbox, config)),
        *disk_checks(config, lambda: checkpoint_bytes(config, this_machine()) if config else 0),
    ]
    return checks + (service_checks(config) if config is not None else [])


def _ray(section: ClusterSection) -> Result:
    check_machine(section)
    address, source = cluster_address(section)
    return ok(f"{source} ({address})" if address else "a local Ray can start")


def _shared_memory(config: AnyConfig | None) -> Result:
    num_gpus = this_machine()[0].gpus
    if config is not None:
        engines = engine_config(config)
        sharded = engines.rollout.engine.tensor_parallel if engines else 1
        num_gpus = min(num_gpus, max(config.learner.num_workers, sharded))
    return system_checks.shared_memory(num_gpus)
