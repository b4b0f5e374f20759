"""Where engines and frozen models run, on what, and how their replicas are watched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import Field

from raypo.config.base import Config


class DeploymentSection(Config):
    """How replicas of engines and frozen models are watched and asked; the words of Ray Serve."""

    max_queued_requests: int | None = Field(default=None, ge=0)
    """Most requests that wait at a replica; beyond, they wait at the callers; null: no bound."""
    request_timeout_s: float | None = Field(default=None, gt=0.0)
    """Seconds that a worker waits for an answer before the run stops; null: without end."""
    health_check_period_s: float = Field(default=10.0, gt=0.0)
    """Seconds that a worker waits for an answer before it checks the replica, and again; a process
    that ends is seen within seconds."""
    health_check_timeout_s: float = Field(default=30.0, gt=0.0)
    """Seconds without an answer to a check after which a replica is killed and started again."""
    stall_timeout_s: float | None = Field(default=900.0, gt=0.0)
    """Seconds that one step of an engine, one bucket of a push to it or one forward pass of a
    frozen model may take; then the replica counts as hung, and is killed and started again; null:
    any."""
    graceful_shutdown_timeout_s: float = Field(default=20.0, ge=0.0)
    """Seconds that requests under way get when a deployment is shut down."""
    max_restarts: int = Field(default=3, ge=0)
    """Times that each replica is started again; the run stops when none of a role is left."""


Group = Literal["colocated", "dedicated"]
RoleKind = Literal["engine", "reference", "reward"]


class GpuShares(Config):
    """GPUs that one replica takes of a dedicated bundle; what is below 1 is shared."""

    engine: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of each of an engine's `rollout.engine.tensor_parallel` GPUs."""
    reference: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share that the reference takes."""
    reward: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share that each reward model takes."""


class FrozenSection(Config):
    """How a frozen model is computed."""

    backend: Literal["torch", "vllm"] = "torch"
    """torch: transformers on one device; vllm: also on several, and its memory is set aside."""
    num_replicas: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Replicas, each asked by the learner workers near to it; auto: one on each worker's GPU (on
    each `tensor_parallel` of them), on CPUs one on each node, of a dedicated group one."""
    tensor_parallel: int = Field(default=1, ge=1)
    """vllm: GPUs of one node that share a replica: those of the first workers, whose bundles it
    spans, or of one dedicated bundle. On CPU as many processes share it."""
    gpu_memory_fraction: float = Field(default=0.4, gt=0.0, le=1.0)
    """vllm: of each of its GPUs, weights included."""

    def _problems(self) -> Iterator[str]:
        if self.tensor_parallel > 1 and self.backend == "torch":
            yield (
                f"tensor_parallel ({self.tensor_parallel}): backend torch computes on one device. "
                f"Set backend to vllm, or tensor_parallel to 1."
            )


class FrozenSections(Config):
    """How the frozen models are computed, by role."""

    reference: FrozenSection = FrozenSection()
    reward: FrozenSection = FrozenSection()
    """How each reward model is computed."""


class PlacementSection(Config):
    """Where engines and frozen models run."""

    mode: Group | dict[RoleKind, Group] = "colocated"
    """colocated: in the learner workers' own placement group, on their devices. dedicated: in a
    group of their own, which outlives a restart of the workers. Or by role, the others colocated:
    {engine: dedicated, reference: colocated, reward: colocated}."""
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "PACK"
    """Ray's placement strategy of each of the two groups."""
    gpus: GpuShares = GpuShares()
    """dedicated: by role. Replicas are put into one bundle as long as their shares fit a GPU."""
    frozen: FrozenSections = FrozenSections()
    """Backend and tensor parallelism of reference and reward models."""
    cpus_per_bundle: int = Field(default=1, ge=1)
    """dedicated: CPU cores of each bundle; the replicas in it take turns on them."""
    timeout_s: float = Field(default=600.0, gt=0.0)
    """Seconds that engines and frozen models may take to start."""
    deployment: DeploymentSection = DeploymentSection()

    def group_of(self, role: RoleKind) -> Group:
        """Where a role lives."""
        return self.mode if isinstance(self.mode, str) else self.mode.get(role, "colocated")

    @property
    def is_dedicated(self) -> bool:
        """Whether any role lives in a group of its own."""
        return any(self.group_of(role) == "dedicated" for role in get_args(RoleKind))
