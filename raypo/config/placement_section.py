"""The `placement` section: where engines and frozen models run, and health checks of their
replicas.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from raypo.config.base import Config
from raypo.config.only_if import only_if


class DeploymentSection(Config):
    """Time limits, health checks and restarts of the replicas of engines and frozen models. The
    keys are named as in Ray Serve.
    """

    request_timeout_s: float | None = Field(default=None, gt=0.0)
    """Seconds that a worker waits for a reply before the run stops. null means no timeout."""
    health_check_period_s: float = Field(default=10.0, gt=0.0)
    """Seconds that a worker waits for a reply before each health check of the replica. A dead
    process is noticed within seconds regardless."""
    health_check_timeout_s: float = Field(default=30.0, gt=0.0)
    """Timeout of a health check, in seconds. A replica that does not answer is killed and
    restarted."""
    stall_timeout_s: float | None = Field(default=900.0, gt=0.0)
    """Seconds that one engine step, one bucket of a weight push or one forward pass of a frozen
    model may take. A replica that takes longer counts as hung, and is killed and restarted. null
    means no limit."""
    graceful_shutdown_timeout_s: float = Field(default=20.0, ge=0.0)
    """Seconds that requests in flight have to finish when a deployment is shut down."""
    max_restarts: int = Field(default=3, ge=0)
    """Maximum number of restarts of each replica. The run stops when a role has no replica left."""


Group = Literal["colocated", "dedicated"]
RoleKind = Literal["engine", "reference", "reward", "judge"]
_SELECTS = re.compile(r"!?(in\([\w., -]+\)|[\w.-]+)")
"""Values of Ray's label selectors: v, !v, in(v, w) or !in(v, w)."""


class GpuShares(Config):
    """GPU share of one replica, for dedicated roles."""

    engine: float = Field(default=1.0, gt=0.0, le=1.0)
    """GPU share of an engine on each of its `rollout.engine.tensor_parallel` GPUs."""
    reference: float = Field(default=0.5, gt=0.0, le=1.0)
    """GPU share of a replica of the reference model."""
    reward: float = Field(default=0.5, gt=0.0, le=1.0)
    """GPU share of a replica of a reward model."""
    judge: float = Field(default=0.5, gt=0.0, le=1.0)
    """GPU share of a replica of the judge that the run deploys."""


class FrozenSection(Config):
    """Inference of a frozen model."""

    backend: Literal["torch", "vllm"] = "torch"
    """Inference backend. torch: transformers, on one device; vllm: on one or several devices, with
    its memory reserved in advance."""
    num_replicas: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Number of replicas. Each serves the learner workers near it. auto: one per `tensor_parallel`
    workers if colocated on GPUs, one per node if colocated on CPUs, a single one if dedicated."""
    tensor_parallel: Annotated[int, only_if("backend", "vllm")] = Field(default=1, ge=1)
    """Number of GPUs of one node that a replica is sharded over. A colocated replica spans
    the bundles of this many workers. A dedicated replica has one bundle. On CPUs: number of
    processes."""
    gpu_memory_fraction: Annotated[float, only_if("backend", "vllm")] = Field(
        default=0.4, gt=0.0, le=1.0
    )
    """Fraction of a GPU's memory that a replica may use, weights included."""


class JudgeModelSection(FrozenSection):
    """Inference of the judge that the run deploys, in vLLM."""

    backend: Literal["vllm"] = "vllm"  # pyright: ignore[reportIncompatibleVariableOverride]
    """Inference backend. Only vllm can sample answers."""


class FrozenSections(Config):
    """Inference of the frozen models, by role: backend, replicas and tensor parallelism."""

    reference: FrozenSection = FrozenSection()
    reward: FrozenSection = FrozenSection()
    """Settings of every reward model."""
    judge: JudgeModelSection = JudgeModelSection()
    """Settings of the judge of `reward.judge.path`."""


class PlacementSection(Config):
    """Placement of engines and frozen models."""

    mode: Group | dict[RoleKind, Group] = "colocated"
    """Placement of the roles. colocated: in the learner workers' placement group, on their devices.
    dedicated: in a placement group of their own, which survives a restart of the workers. A mapping
    sets the placement of each role, like {engine: dedicated, reference: colocated, reward:
    colocated, judge: dedicated}. Roles that it does not name are colocated."""
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """Ray's placement strategy for each of the two groups."""
    label_selector: dict[str, str] | dict[str, dict[str, str]] = Field(default={})
    """Ray's label selector: the run takes only nodes whose labels match, like
    {ray.io/accelerator-type: H100, ray.io/market-type: "!spot"}. A value is v, !v, in(v, w) or
    !in(v, w). Dedicated roles can have other selectors than the learner: {learner: {...}, engine:
    {...}, reference: {...}, reward: {...}, judge: {...}}. The selector of learner also applies to
    the critic and to all colocated roles."""
    gpus: GpuShares = GpuShares()
    """GPU share of each dedicated replica. Replicas are packed into one bundle as long as their
    shares fit on one GPU."""
    frozen: FrozenSections = FrozenSections()
    cpus_per_bundle: int = Field(default=1, ge=1)
    """CPU cores of each dedicated bundle. The replicas in a bundle use its cores in turns."""
    timeout_s: float = Field(default=600.0, gt=0.0)
    """Seconds that engines and frozen models may take to start."""
    hang_timeout_s: float | None = Field(default=1800.0, gt=0.0)
    """Seconds without progress after which the run counts as hung, from the first weight push on.
    Progress is anything that moves: a sampled token, a scored response, a microbatch, a bucket of a
    push, a file. The run then says who waits for whom, writes the stacks of all of its
    processes to hangs/ in its folder, and kills its learner workers. They resume from the last
    checkpoint as often as `max_failures` allows. A single call of a reward function that takes all
    responses at once may not take longer. A longer limit of reward.timeout_s, eval.timeout_s,
    rollout.step_timeout_s or placement.deployment.stall_timeout_s that was set, plus 5%, takes the
    place of this one. null means no limit."""
    deployment: DeploymentSection = DeploymentSection()

    def _problems(self) -> Iterator[str]:
        period = self.deployment.health_check_period_s
        if self.hang_timeout_s is not None and self.hang_timeout_s < 2 * period:
            yield (
                f"placement.hang_timeout_s ({self.hang_timeout_s:g}): must be at least twice "
                f"placement.deployment.health_check_period_s ({period:g}), by which the progress "
                "of engines is read. Raise it, or lower that period."
            )
        key = "placement.label_selector"
        roles: tuple[RoleKind, ...] = get_args(RoleKind)
        groups = {role: self.group_of(role) for role in roles}
        for name, selector in self.label_selector.items():
            if isinstance(selector, str):
                yield from _refused_labels(key, {name: selector})
                continue
            yield from _refused_labels(f"{key}.{name}", selector)
            if name not in ("learner", *roles):
                yield f"{key}.{name}: must be one of learner, {', '.join(roles)}. Correct the role."
            elif groups.get(name) == "colocated":
                yield (
                    f"{key}.{name} ({selector}): has no effect, because a colocated role uses the "
                    f"learner workers' bundles. Remove it, or set placement.mode to {{{name}: "
                    "dedicated}."
                )

    def group_of(self, role: RoleKind) -> Group:
        """Return the placement of a role."""
        return self.mode if isinstance(self.mode, str) else self.mode.get(role, "colocated")

    def labels_of(self, role: Literal["learner"] | RoleKind) -> dict[str, str]:
        """Return the label selector of a role's bundles."""
        is_by_role = any(isinstance(value, dict) for value in self.label_selector.values())
        selector: Any = self.label_selector.get(role, {}) if is_by_role else self.label_selector
        return dict(selector)

    @property
    def is_dedicated(self) -> bool:
        """True if any role is dedicated."""
        return any(self.group_of(role) == "dedicated" for role in get_args(RoleKind))


def _refused_labels(key: str, selector: Mapping[str, str]) -> Iterator[str]:
    for label, value in selector.items():
        if not _SELECTS.fullmatch(value):
            yield (
                f"{key} ({label}: {value}): Ray selects by v, !v, in(v, w) or !in(v, w). Write the "
                f"value like one of these."
            )
