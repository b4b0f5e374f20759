"""How responses are sampled, and by which engines."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from raypo.config.base import Config, ConfigError


class EngineSection(Config):
    """The vLLM engines that sample."""

    count: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Engines; auto: one on CPU, one for each `tensor_parallel` workers on GPU."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one node that share an engine: of as many workers, or of one dedicated bundle. On
    CPU as many processes share it."""
    gpu_memory_fraction: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share of a GPU's memory that an engine may take."""
    kv_cache_gb: float | None = Field(default=None, gt=0.0)
    """KV cache in GB of each device; null: a fitting size on CPU, what `gpu_memory_fraction`
    leaves on GPU."""
    transport: Literal["auto", "object", "ipc", "nccl"] = "auto"
    """How new weights reach the engines. object: through Ray's object store, anywhere; ipc: CUDA
    IPC, for engines on the learner workers' GPUs; nccl: broadcast, for engines on GPUs of their
    own; auto: the one of these that fits."""
    push_timeout_s: float = Field(default=300.0, gt=0.0)
    """nccl: seconds that the broadcast of one bucket (256 MB) may take."""
    sleep: bool = True
    """GPU, colocated: engine, frozen models and learner take turns in the GPU's memory; whoever
    does not work is off-loaded to the host. false: all stay, which is faster where they fit."""
    prefix_caching: bool = True
    """Keep the keys and values of shared prompt prefixes between requests of one weight version."""
    max_waiting_requests: int = Field(default=4096, ge=1)
    """Requests that may wait in an engine to join those that it samples; whoever asks for more
    waits for a place. The batches of a synchronous run do not count."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Any other argument of vLLM's EngineArgs; it wins over raypo's choice. What another key says
    is refused here."""

    def resolved_count(self, *, num_workers: int, use_gpu: bool) -> int:
        """Engines that are started."""
        if self.count != "auto":
            return self.count
        return max(1, num_workers // self.tensor_parallel) if use_gpu else 1

    def resolved_transport(
        self, *, colocated: bool, use_gpu: bool
    ) -> Literal["object", "ipc", "nccl"]:
        """The transport that is used.

        Args:
            colocated: The engines live on the learner workers' devices.
            use_gpu: These devices are GPUs.

        Raises:
            ConfigError: the one that is set cannot work here.
        """
        if self.transport == "object" or (self.transport == "auto" and not use_gpu):
            return "object"
        fitting = "ipc" if colocated else "nccl"
        if self.transport not in ("auto", fitting):
            where = "on the learner workers' own GPUs" if colocated else "on GPUs of their own"
            rule = {
                "ipc": "CUDA IPC needs engine and learner worker on one GPU",
                "nccl": "NCCL needs another GPU for every member",
            }[self.transport]
            raise ConfigError(
                f"rollout.engine.transport ({self.transport}): {rule}, and the engines are "
                f"{where}. Set rollout.engine.transport to auto, {fitting} or object."
            )
        if not use_gpu:
            raise ConfigError(
                f"rollout.engine.transport ({self.transport}): needs GPUs, and the learner workers "
                "have none (learner.use_gpu). Set rollout.engine.transport to auto or object."
            )
        return fitting


class SamplingSection(Config):
    """How held-out prompts are answered, where `eval.function` judges the answers."""

    max_new_tokens: int = Field(default=64, ge=1)
    """Longest response in tokens."""
    temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature; log-probs everywhere are of the tempered distribution."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus sampling; below 1 the engine's log-probs are of the truncated distribution."""
    engine: EngineSection = EngineSection()


class RolloutSection(SamplingSection):
    """How responses are sampled."""

    prompts_per_step: int = Field(default=32, ge=1)
    """Prompts of one step, over all workers."""
    samples_per_prompt: int = Field(default=4, ge=1)
    """Responses sampled for each prompt."""
    mode: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: sample, then update. one_step_off: sample the next step's batch while the learner
    updates, one weight version behind; runs repeat bit for bit. async: as far ahead as
    `max_staleness` lets it. The last two need engines with resources of their own
    (placement.mode)."""
    max_staleness: Annotated[int, Field(ge=0)] | Literal["auto"] = "auto"
    """async: most weight versions between the first token of a response and the update that trains
    it; auto: 1. In the other modes it is what the mode says: 0 or 1."""

    @property
    def staleness(self) -> int:
        """The bound on staleness, in weight versions."""
        usual = 0 if self.mode == "sync" else 1
        return usual if self.max_staleness == "auto" else self.max_staleness

    @model_validator(mode="after")
    def _staleness_is_the_modes(self) -> Self:
        usual = {"sync": 0, "one_step_off": 1}.get(self.mode, self.staleness)
        if self.staleness != usual:
            raise ValueError(
                f"max_staleness ({self.max_staleness}): mode {self.mode} has {usual}. Set "
                f"max_staleness to auto, or mode to async."
            )
        return self
