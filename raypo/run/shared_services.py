"""Deployments that are started once for a sweep, and then shared by its trials or leased."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ray

from raypo.cluster.actors import survivors
from raypo.cluster.placement import served_roles, with_dedicated
from raypo.collectives import Workers
from raypo.config import OnlineConfig
from raypo.config.auto_values import with_auto_of
from raypo.deployment.deployment import DeploymentHandle, Placement, start_deployment
from raypo.deployment.engine_pool import Lease
from raypo.deployment.reserve import MESSAGE_AFTER_S, Dedicated
from raypo.run.dedicated_services import start_dedicated
from raypo.run.served_roles import class_and_arguments, make_deployment
from raypo.run.setup import Shared
from raypo.serving.engine import Engine
from raypo.tracking.console import Console


def start_shared(
    config: OnlineConfig,
    name: str,
    roles: Collection[str],
    *,
    logs_dir: str,
    use_gpu: bool,
    num_adapters: int = 0,
) -> Dedicated:
    """Start roles that several runs share.

    On GPUs, the roles get a separate placement group. On CPUs, they reserve no resources, because
    they take turns with the learners that call them.

    Args:
        config: Config with absolute paths.
        name: Name of the shared deployments.
        roles: Roles to start: engine, reference, reward_0, ...
        logs_dir: Folder for the replicas' logs.
        use_gpu: True if the runs use GPUs.
        num_adapters: Number of runs that use the engines at the same time, each with its own
            adapter. 0 means that only one run at a time uses them and pushes whole weights.

    Returns:
        Handles of the deployments, and their placement group if there is one.

    Raises:
        PlacementError: the group could not be placed within `placement.timeout_s`.
    """
    # Trials may have different batch sizes, or use an engine at the same time.
    extra_kwargs: dict[str, dict[str, Any]] = {"engine": {"max_requests": None}}
    if num_adapters:
        extra_kwargs["engine"] |= {"max_adapters": num_adapters, "reads_weights": True}
    if use_gpu:
        return start_dedicated(
            with_dedicated(config, roles),
            name,
            logs_dir=logs_dir,
            use_gpu=True,
            extra_kwargs=extra_kwargs,
        )
    learner, handles = config.learner, {}
    for role in served_roles(config, num_workers=learner.num_workers, use_gpu=False):
        if role.name not in roles:
            continue
        count = 1 if role.num_replicas == "auto" else role.num_replicas
        threads = learner.cpus_per_worker
        if role.kind == "engine":
            threads = threads * learner.total_workers // count
        deployment = make_deployment(
            role,
            config,
            num_threads=threads,
            run_name=name,
            logs_dir=logs_dir,
            **extra_kwargs.get(role.name, {}),
        )
        handles[role.name] = start_deployment(deployment, [Placement()] * count)
    return Dedicated(handles)


def shared_handles_for(
    shared: Shared | None, config: OnlineConfig, run_name: str, workers: Workers
) -> dict[str, DeploymentHandle]:
    """Return the sweep's running deployments that fit this config, by role."""
    if shared is None:
        return {}
    # The shared deployments were started before any trial knew its GPUs, so their config still has
    # `auto` values.
    different_roles = roles_with_different_deployments(
        with_auto_of(config, shared.config), shared.config
    )
    usable_roles: list[str] = []
    if workers.rank == 0:
        usable_roles = [role for role, handle in shared.handles.items() if not handle.is_lost()]
    usable_roles = workers.broadcast(usable_roles)  # all workers must use the same deployments
    handles = {role: shared.handles[role] for role in usable_roles if role not in different_roles}
    if shared.engine_pool is not None and "engine" not in different_roles:
        engine = lease_engines(shared, run_name, workers, timeout_s=config.placement.timeout_s)
        if engine is not None:
            handles["engine"] = engine
    return handles


def lease_engines(
    shared: Shared, run_name: str, workers: Workers, *, timeout_s: float
) -> DeploymentHandle | None:
    """Lease engines for this run. The lease ends when the run's first worker, the caller, dies.

    Returns:
        The engines' handle, or None if no engines become free within `timeout_s`.
    """
    lease: Lease | None = None
    if workers.rank == 0:
        engine_pool: Any = shared.engine_pool
        this_worker = ray.get_runtime_context().current_actor
        lease_ref = engine_pool.lease.remote(run_name, this_worker, timeout_s)
        if not ray.wait([lease_ref], timeout=MESSAGE_AFTER_S)[0]:
            run_names = ", ".join(ray.get(engine_pool.runs.remote()))
            Console().message(
                f"waiting for engines, up to {timeout_s:g} s (placement.timeout_s): {run_names} "
                "are using the sweep's engines"
            )
        lease = ray.get(lease_ref)
        if lease is not None and shared.pool and lease.previous_run is not None:
            # Make room for this run's adapter. Ignore lost replicas: a restarted replica does not
            # have the old adapter.
            survivors(lease.handle.control(Engine.drop_adapter, lease.previous_run))
    return workers.broadcast(lease and lease.handle)


def roles_with_different_deployments(first: OnlineConfig, second: OnlineConfig) -> set[str]:
    """Return the roles that both configs have, but with different class arguments."""
    first_arguments, second_arguments = (
        {
            role.name: class_and_arguments(role, config)[1] | {"seed": None, "max_requests": None}
            for role in served_roles(config, num_workers=1, use_gpu=False)
        }
        for config in (first, second)
    )
    return {
        name
        for name in first_arguments.keys() & second_arguments.keys()
        if first_arguments[name] != second_arguments[name]
    }
