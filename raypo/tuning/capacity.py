"""Capacity of a sweep: its trials, the resources of each, and how many run concurrently."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raypo.cluster.placement import (
    Bundle,
    PlacementError,
    Resources,
    count_group_copies,
    dedicated_bundles,
    lay_out,
    place,
    remaining_resources,
    worker_bundles,
)
from raypo.config import AnyConfig, ConfigError
from raypo.config.sweep_config import SharedRole, SweepConfig
from raypo.tuning.shared import Sharing


@dataclass(frozen=True)
class SweepPlan:
    """Number of trials, resources of each trial, and number of concurrent trials."""

    num_trials: int
    bundles: tuple[Bundle, ...]
    """Bundles that a trial holds, for its workers and its dedicated group."""
    num_slots: int
    """Number of concurrent trials."""
    sharing: Sharing
    """Deployments that all trials share."""

    @property
    def device(self) -> str:
        """Unit of cost: GPU if a trial has GPUs, otherwise CPU."""
        return "GPU" if _amount("GPU", self.bundles) else "CPU"

    @property
    def num_devices(self) -> float:
        """Number of devices that a trial holds."""
        return _amount(self.device, self.bundles)


def _refuse_elastic(base: AnyConfig) -> None:
    if base.learner.is_elastic:
        raise ConfigError(
            f"learner.min_workers ({base.learner.min_workers}): every trial of a sweep keeps its "
            "resources from start to end. Set learner.num_workers to one number in the base, or "
            "by overrides.learner.num_workers."
        )


def plan_sweep(
    sweep: SweepConfig, base: AnyConfig, nodes: Sequence[Resources], *, use_gpu: bool
) -> SweepPlan:
    """Plan as many concurrent trials as the cluster has room for. The other trials wait.

    A trial holds the bundles of its learner workers, and a second group if its engines or frozen
    models are dedicated. Deployments that all trials share are placed before the trials.

    Args:
        sweep: Config of the sweep.
        base: Run config of a trial, without the values of the space.
        nodes: Resources of each node of the cluster.
        use_gpu: Whether a learner worker takes a GPU.

    Raises:
        ConfigError: not even one trial fits, pbt cannot run all trials concurrently, or a trial is
            elastic.
    """
    try:
        lay_out(base, nodes, use_gpu=use_gpu)
    except PlacementError as error:
        raise PlacementError(
            f"{error} These are keys of {sweep.base}; in the sweep file, write for example "
            "overrides.learner.num_workers for learner.num_workers."
        ) from error
    max_concurrent = sweep.num_trials if sweep.max_concurrent == "auto" else sweep.max_concurrent
    plan = plan_trials(
        base,
        [trial for _, trial in sweep.trials()],
        nodes,
        num_trials=sweep.num_trials,
        max_slots=max_concurrent,
        share=sweep.share,
        use_gpu=use_gpu,
    )
    if sweep.scheduler.kind == "pbt" and plan.num_slots < sweep.num_trials:
        raise ConfigError(
            f"num_samples ({sweep.num_trials}): pbt compares trials that run at the same time, "
            f"and {plan.num_slots} of {_bundles_text(plan.bundles)} fit here. Set num_samples to "
            f"{max(2, plan.num_slots)}, or lower the resources of a trial "
            "(overrides.learner.cpus_per_worker)."
        )
    return plan


def plan_trials(
    base: AnyConfig,
    trials: Sequence[AnyConfig],
    nodes: Sequence[Resources],
    *,
    num_trials: int,
    max_slots: int,
    share: Sequence[SharedRole] | Literal["auto"],
    use_gpu: bool,
    worker_resources: Resources | None = None,
) -> SweepPlan:
    """Plan as many concurrent trials as fit next to the deployments that they share.

    Args:
        base: Run config of a trial, without the values of the space.
        trials: Run configs that represent all trials.
        nodes: Resources of each node. The cluster has room for at least one trial.
        num_trials: Number of trials.
        max_slots: Maximum number of concurrent trials.
        share: Roles to share. `auto` shares all roles. On GPUs it does so only if sharing does not
            lower the number of concurrent trials.
        use_gpu: Whether a learner worker takes a GPU.
        worker_resources: Resources of a learner worker. None means the resources in the config.

    Raises:
        ConfigError: no trial fits next to the shared deployments, or a trial is elastic.
    """
    _refuse_elastic(base)
    strategy = base.placement.strategy
    trial_groups = [
        dedicated_bundles(base, use_gpu=use_gpu),
        worker_bundles(base, use_gpu=use_gpu, resources_per_worker=worker_resources),
    ]
    wanted_slots = min(num_trials, max_slots)
    num_slots = count_group_copies(trial_groups, nodes, strategy, max_copies=wanted_slots)
    sharing = Sharing.of(base, trials, share=share, use_gpu=use_gpu)
    if sharing.bundles:
        shared_nodes = place(sharing.bundles, nodes, strategy)
        free_nodes = remaining_resources(nodes, sharing.bundles, shared_nodes)
        remaining_slots = count_group_copies(
            trial_groups, free_nodes, strategy, max_copies=wanted_slots
        )
        if len(shared_nodes) < len(sharing.bundles):
            remaining_slots = 0
        if share == "auto" and remaining_slots < num_slots:
            sharing = Sharing()
        elif not remaining_slots:
            raise ConfigError(
                f"share ({', '.join(sharing.roles)}): with these roles in {len(sharing.bundles)} "
                "separate bundles, no trial fits. Set share to []."
            )
        else:
            num_slots = remaining_slots
    bundles = tuple(bundle for group in trial_groups for bundle in group)
    return SweepPlan(num_trials, bundles, num_slots, sharing)


def describe(sweep: SweepConfig, plan: SweepPlan) -> list[str]:
    """Return the plan as lines for the terminal."""
    goals = ", ".join(
        f"{metric} ({mode})" for metric, mode in zip(sweep.metric, sweep.mode, strict=True)
    )
    lines = [
        f"{sweep.name}: {plan.num_trials} trials of {sweep.base}, judged by {goals}",
        *(f"  constraint {text}" for text in sweep.constraint),
        f"  searcher {sweep.searcher}, scheduler {sweep.scheduler.kind}",
        *(f"  {key}: {domain}" for key, domain in sweep.space.items()),
        f"  each trial takes {_bundles_text(plan.bundles)}; {plan.num_slots} at a time, the "
        "others wait",
        *plan.sharing.lines(),
    ]
    if sweep.searcher == "grid":
        for index, point in enumerate(grid_points(sweep)):
            point_text = ", ".join(f"{key}={value}" for key, value in point.items())
            lines.append(f"  {trial_name(sweep.name, index)}: {point_text}")
    return lines


def grid_points(sweep: SweepConfig) -> list[dict[str, Any]]:
    """Return all points of a grid. The last key of the space changes fastest."""
    values_by_key = {key: domain.values for key, domain in sweep.space.items()}
    return [
        dict(zip(values_by_key, point, strict=True))
        for point in itertools.product(*values_by_key.values())
    ]


def trial_name(sweep: str, index: int) -> str:
    """Return the name of a trial's run. It is the same when the sweep resumes."""
    return f"{sweep}-{index:05d}"


def _amount(name: str, bundles: Sequence[Bundle]) -> float:
    return sum(bundle.resources.get(name, 0.0) for bundle in bundles)


def _bundles_text(bundles: Sequence[Bundle]) -> str:
    """Format bundles, like `2 x (1 CPU + 1 GPU)`. Equal bundles are counted."""
    counts = Counter(
        " + ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.resources.items()))
        for bundle in bundles
    )
    parts = [text if count == 1 else f"{count} x ({text})" for text, count in counts.items()]
    return " and ".join(parts)
