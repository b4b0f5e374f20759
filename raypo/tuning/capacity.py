"""What a sweep will do: its trials, what each asks of the cluster, and how many run at a time."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypo.cluster.placement import Demand, Resources, check_feasible, room
from raypo.config import ConfigError, PPOConfig
from raypo.config.paths import storage_path
from raypo.config.sweep_config import SweepConfig
from raypo.metrics.clock import duration
from raypo.storage.run_files import RunFiles
from raypo.tuning.shared import Sharing
from raypo.tuning.sweep_folder import TRIALS_FOLDER


@dataclass(frozen=True)
class SweepPlan:
    """How many trials, of which size, how many at a time."""

    num_trials: int
    demand: Demand
    """Of one trial."""
    num_slots: int
    """Trials at a time."""
    sharing: Sharing
    """What all trials have in common."""

    @property
    def device(self) -> str:
        """The unit of cost: GPU where a trial has any, else CPU."""
        return "GPU" if self.demand.bundle.get("GPU") else "CPU"

    @property
    def num_devices(self) -> float:
        """Devices that a trial holds."""
        return self.demand.bundle[self.device] * self.demand.count

    @property
    def trial_resources(self) -> str:
        """What a trial takes, for people."""
        return _words(self.demand.bundle, self.demand.count)


def plan_sweep(
    sweep: SweepConfig, base: PPOConfig, nodes: Sequence[Resources], *, use_gpu: bool
) -> SweepPlan:
    """Fit as many trials side by side as the cluster holds; the others wait for their turn.

    Engines and frozen models live in the bundles of the learner workers or are shared by all
    trials, so a trial asks for no more than these bundles; it is given all of them at once or
    waits, so that no two trials hold halves.

    Args:
        nodes: Resources of each node of the cluster.
        use_gpu: Whether a learner worker takes a GPU.

    Raises:
        ConfigError: not even one trial fits.
    """
    learner, strategy = base.learner, base.placement.strategy
    bundle = {"CPU": float(learner.cpus_per_worker)} | ({"GPU": 1.0} if use_gpu else {})
    demand = Demand(
        role="learner workers of one trial",
        bundle=bundle,
        count=learner.num_workers,
        remedy="Lower learner.num_workers or learner.cpus_per_worker of the base.",
    )
    check_feasible(demand, list(nodes), strategy=strategy)
    fits = _sets(demand, nodes, strategy)
    sharing = Sharing.of(sweep, base, use_gpu=use_gpu)
    if sharing.bundles:
        beside = sharing.room_beside(nodes, lambda rest: _sets(demand, rest, strategy))
        if sweep.share == "auto" and beside < fits:
            sharing = Sharing(first_rollout=sharing.first_rollout)
        elif not beside:
            raise ConfigError(
                f"share ({', '.join(sharing.roles)}): with these in "
                f"{len(sharing.bundles)} bundles of their own, no trial fits. Set share to []."
            )
        else:
            fits = beside
    for key, name in (("cpus", "CPU"), ("gpus", "GPU")):
        limit, asked = getattr(sweep.resources, key), bundle.get(name, 0.0) * demand.count
        if limit is None or not asked:
            continue
        if limit < asked:
            raise ConfigError(
                f"resources.{key} ({limit:g}): one trial takes {asked:g} {name}. Set "
                f"resources.{key} to at least {asked:g}, or give a trial of the base less."
            )
        fits = min(fits, int(limit / asked + 1e-9))
    wanted = fits if sweep.max_concurrent == "auto" else min(sweep.max_concurrent, fits)
    num_slots = max(1, min(wanted, sweep.num_trials))
    if sweep.scheduler.kind == "pbt" and num_slots < sweep.num_trials:
        raise ConfigError(
            f"num_samples ({sweep.num_trials}): pbt compares trials that run at the same time, and "
            f"{num_slots} of {_words(bundle, demand.count)} fit here. Set num_samples to "
            f"{max(2, num_slots)}, or have a trial take less (overrides.learner.cpus_per_worker)."
        )
    return SweepPlan(sweep.num_trials, demand, num_slots, sharing)


def _sets(demand: Demand, nodes: Sequence[Resources], strategy: str) -> int:
    """Trials that fit side by side, each with all its bundles."""
    if strategy == "STRICT_PACK":
        return sum(room(demand.bundle, [node], strategy) // demand.count for node in nodes)
    if strategy == "STRICT_SPREAD":  # at most one bundle of a trial on a node
        by_node = [room(demand.bundle, [node], "PACK") for node in nodes]
        sets = max(by_node, default=0)
        while sets and sum(min(each, sets) for each in by_node) < sets * demand.count:
            sets -= 1
        return sets
    return room(demand.bundle, list(nodes), strategy) // demand.count


def describe(sweep: SweepConfig, base: PPOConfig, plan: SweepPlan) -> list[str]:
    """The plan as lines for people."""
    goals = ", ".join(f"{m} ({mode})" for m, mode in zip(sweep.metric, sweep.mode, strict=True))
    lines = [
        f"{sweep.name}: {plan.num_trials} trials of {sweep.base}, judged by {goals}",
        *(f"  constraint {text}" for text in sweep.constraint),
        f"  searcher {sweep.searcher}, scheduler {sweep.scheduler.kind}",
        *(f"  {key}: {domain}" for key, domain in sweep.domains.items()),
        f"  each trial takes {plan.trial_resources}; {plan.num_slots} at a time, the others wait",
        *plan.sharing.lines(),
    ]
    known = estimate(sweep, base, plan)
    lines.append(f"  cost: {known or 'not known before a first run of the base'}")
    if sweep.searcher == "grid":
        for number, point in enumerate(grid_points(sweep)):
            words = ", ".join(f"{key}={value}" for key, value in point.items())
            lines.append(f"  {trial_name(sweep.name, number)}: {words}")
    return lines


@dataclass(frozen=True)
class Estimate:
    """What a sweep will cost if no trial is stopped early, judged by a run that is there."""

    device_s: float
    wall_s: float
    source: str
    """The run that was measured."""

    def __str__(self) -> str:
        return (
            f"at most {self.device_s:.0f} device-seconds, {duration(self.wall_s)}, judged by "
            f"{self.source}; start-up comes on top"
        )


def estimate(sweep: SweepConfig, base: PPOConfig, plan: SweepPlan) -> Estimate | None:
    """By the steps of this sweep's trials or of the base's own run; None where neither is there."""
    trials = f"{storage_path(sweep).rstrip('/')}/{sweep.name}/{TRIALS_FOLDER}"
    runs = [(trials, trial_name(sweep.name, number)) for number in range(plan.num_trials)]
    for storage, name in [*runs, (storage_path(base), base.name)]:
        rows = RunFiles(storage, name).metrics()
        steps = [row["time/step_s"] for row in rows if "time/step_s" in row]
        if steps:
            trial_s = statistics.median(steps) * base.num_steps
            rounds = -(-plan.num_trials // plan.num_slots)
            return Estimate(
                trial_s * plan.num_trials * plan.num_devices, trial_s * rounds, f"the run {name}"
            )
    return None


def grid_points(sweep: SweepConfig) -> list[dict[str, Any]]:
    """Every combination of the lists of the space, the last key changing fastest."""
    by_key = {key: domain.values for key, domain in sweep.domains.items()}
    return [dict(zip(by_key, point, strict=True)) for point in itertools.product(*by_key.values())]


def trial_name(sweep: str, number: int) -> str:
    """Name of a trial's run: unique in a cluster, the same when the sweep is resumed."""
    return f"{sweep}-{number:05d}"


def _words(bundle: Resources, count: int) -> str:
    asked = " + ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()))
    return asked if count == 1 else f"{count} x ({asked})"
