"""Deployments that the trials of a sweep share: frozen models, and a pool of engines.

On small machines most of a trial's cost is start-up, and most of the start-up is loading models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import ray

from raypo.cluster.placement import Bundle, dedicated_bundles, with_dedicated
from raypo.config import AnyConfig, OnlineConfig
from raypo.config.sweep_config import SharedRole
from raypo.run.setup import Shared


@dataclass(frozen=True)
class Sharing:
    """Deployments that the sweep starts, for its trials to share."""

    models: tuple[str, ...] = ()
    """Roles of the frozen models that all trials use: reference, reward_0, ..., judge."""
    engines: bool = False
    """True if each deployment of engines is reused by one trial after another."""
    pool: bool = False
    """True if all trials use the same engines concurrently, each with its own LoRA adapter."""
    bundles: tuple[Bundle, ...] = ()
    """Bundles of the placement group that holds the models and the pool. It is
    empty on CPUs, because all processes share the cores."""

    @classmethod
    def of(
        cls,
        base: AnyConfig,
        trials: Iterable[AnyConfig],
        *,
        share: Sequence[SharedRole] | Literal["auto"],
        use_gpu: bool,
    ) -> Sharing:
        """Return which of the roles in `share` the trials can share.

        A role can be shared if the base has it and no trial's values change it. Dedicated roles are
        never shared, because each trial has them in its own placement group.

        Args:
            base: Run config of a trial, without the values of the space.
            trials: Run configs that represent all trials.
            share: Roles to share. `auto` means all roles.
            use_gpu: Whether a learner worker takes a GPU.
        """
        if not isinstance(base, OnlineConfig):
            return cls()
        from raypo.run.shared_services import roles_with_different_deployments  # imports model code

        roles = get_args(SharedRole) if share == "auto" else share
        colocated_roles = [role for role in roles if base.placement.group_of(role) == "colocated"]
        changed_roles = set[str]()
        for trial in trials:
            assert isinstance(trial, OnlineConfig), "the recipe is the base's"
            changed_roles |= roles_with_different_deployments(trial, base)
        roles_by_kind = {
            "reference": base.references,
            "reward": base.reward_models,
            "judge": base.judge_models,
        }
        models = [
            role
            for kind, roles in roles_by_kind.items()
            if kind in colocated_roles and not changed_roles.intersection(roles)
            for role in roles
        ]
        shares_engine = "engine" in colocated_roles and "engine" not in changed_roles
        pool = shares_engine and base.pushes_adapter
        engines = shares_engine and not base.pushes_adapter and not use_gpu
        dedicated_config = with_dedicated(base, [*models, "engine"] if pool else models)
        bundles = dedicated_bundles(dedicated_config, use_gpu=True) if use_gpu else ()
        return cls(tuple(models), engines, pool, tuple(bundles))

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that all trials use at the same time."""
        return (*self.models, "engine") if self.pool else self.models

    def lines(self) -> list[str]:
        """Return a description as lines for the terminal."""
        lines = []
        if self.roles:
            bundles = f", in {len(self.bundles)} separate bundles" if self.bundles else ""
            lines.append(f"  all trials share {', '.join(self.roles)}{bundles}")
        if self.engines:
            lines.append("  engines are reused from trial to trial")
        return lines


@contextmanager
def shared_deployments(
    sharing: Sharing, base: AnyConfig, name: str, *, num_slots: int, logs_dir: str
) -> Iterator[Shared | None]:
    """Start the shared deployments, and shut them down when the trials have finished.

    Args:
        sharing: Deployments to start.
        base: Base run config with absolute paths.
        name: Name of the sweep.
        num_slots: Number of concurrent trials. Each trial leases one deployment of engines, or a
            slot in the pool.
        logs_dir: Folder of the logs.

    Yields:
        The deployments. None for recipes that learn from examples, which have no deployments.

    Raises:
        PlacementError: the resources of the models were not free in time.
    """
    from raypo.deployment.engine_pool import start_engine_pool
    from raypo.run.shared_services import start_shared  # imports model code

    if not isinstance(base, OnlineConfig):
        yield None
        return
    use_gpu = bool(sharing.bundles)
    base = base.with_dtype(use_gpu=use_gpu)  # the same decision as in each trial
    services, engine_pool = [], None
    try:
        shared_service = start_shared(
            base,
            f"{name}-shared",
            sharing.roles,
            logs_dir=logs_dir,
            use_gpu=use_gpu,
            num_adapters=num_slots if sharing.pool else 0,
        )
        services.append(shared_service)
        if sharing.pool:
            engine_pool = start_engine_pool([shared_service.handles["engine"]] * num_slots)
        if sharing.engines:
            for slot in range(num_slots):
                service_name = f"{name}-lent-{slot}"
                service_logs = f"{logs_dir}/{service_name}"
                services.append(
                    start_shared(
                        base, service_name, ["engine"], logs_dir=service_logs, use_gpu=False
                    )
                )
            engine_pool = start_engine_pool([s.handles["engine"] for s in services[1:]])
        models = {role: shared_service.handles[role] for role in sharing.models}
        yield Shared(base, models, engine_pool, sharing.pool)
    finally:
        if engine_pool is not None:
            ray.kill(engine_pool)
        for service in services:
            service.shutdown(graceful=False)
