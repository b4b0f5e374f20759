"""Deployments that the trials of a sweep have in common: started once, asked or lent by turns."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import ray

from raypo.cluster.deployment import DeploymentHandle, Place, start_deployment
from raypo.cluster.reserve import Dedicated
from raypo.collectives import Workers
from raypo.config import PPOConfig
from raypo.plan.dedicated import with_dedicated
from raypo.recipes.dedicated import start_dedicated
from raypo.recipes.roles import roles_of, settled
from raypo.recipes.setup import Shared


def start_shared(
    config: PPOConfig, name: str, roles: Collection[str], *, logs_dir: str, use_gpu: bool
) -> Dedicated:
    """Start some roles for several runs.

    With GPUs they get a placement group of their own. On CPUs they take nothing: they take turns
    with the learners that ask them.

    Args:
        config: With absolute paths.
        name: Of the whole.
        roles: engine, reference, reward_0, ...

    Raises:
        PlacementError: the group was not free within `placement.timeout_s`.
    """
    if use_gpu:
        return start_dedicated(with_dedicated(config, roles), name, logs_dir=logs_dir, use_gpu=True)
    learner = config.learner
    engines = config.rollout.engine.resolved_count(num_workers=learner.num_workers, use_gpu=False)
    threads = learner.cpus_per_worker
    handles = {
        role.name: start_deployment(
            settled(role, config, name, logs_dir),
            [Place()] * (engines if role.name == "engine" else 1),
        )
        for role in roles_of(
            config,
            engine_threads=threads * learner.num_workers // engines,
            frozen_threads=threads,
        )
        if role.name in roles
    }
    return Dedicated(handles)


def of_shared(
    shared: Shared | None, config: PPOConfig, workers: Workers
) -> dict[str, DeploymentHandle]:
    """What of a sweep's deployments does for this config, by role."""
    if shared is None:
        return {}
    alike = roles_alike(config, shared.config)
    handles = {role: handle for role, handle in shared.handles.items() if role in alike}
    if shared.lender is not None and "engine" in alike:
        engine = borrow(shared.lender, workers, timeout_s=config.placement.timeout_s)
        if engine is not None:
            handles["engine"] = engine
    return handles


def borrow(lender: Any, workers: Workers, *, timeout_s: float) -> DeploymentHandle | None:
    """An engine for all workers of this run until the last of them is dead; None: none is free."""
    this_worker = ray.get_runtime_context().current_actor
    engine: DeploymentHandle | None = None
    if workers.rank == 0:
        engine = ray.get(lender.lend.remote(this_worker, timeout_s))
        if engine is not None:
            engine.forget()  # the weights of the run before
    engine = workers.broadcast(engine)
    if engine is not None and workers.rank > 0:
        ray.get(lender.hold.remote(engine.name, this_worker))
    return engine


def roles_alike(one: PPOConfig, other: PPOConfig) -> set[str]:
    """Roles of which a deployment started for the one config does for the other.

    An engine that holds adapters is its run's own.
    """
    mine, theirs = (
        {role.name: role.kwargs | {"seed": None} for role in roles_of(config, 1, 1)}
        for config in (one, other)
    )
    alike = {name for name, kwargs in mine.items() if kwargs == theirs.get(name)}
    return alike if mine["engine"]["lora"] is None else alike - {"engine"}
