"""DeepSpeed's config, and the part of it that determines memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from raypo.config import OVERLAPPED_STAGE, WorkersSection

REDUCE_BUCKET = 500_000_000
"""Default of DeepSpeed's zero_optimization.reduce_bucket_size, in elements."""
MAX_LIVE = 1_000_000_000
"""Default of DeepSpeed's zero_optimization.stage3_max_live_parameters, in elements."""


@dataclass(frozen=True)
class Sharding:
    """The settings of a DeepSpeed config that determine the memory of a trained model."""

    stage: int
    workers: int = 1
    offload_optimizer: bool = False
    offload_param: bool = False
    on_gpu: bool = False
    overlap_comm: bool | None = None
    """The user's `zero_optimization.overlap_comm`; None means that raypo decides by the stage."""
    reduce_bucket: int = REDUCE_BUCKET
    max_live: int = MAX_LIVE

    @classmethod
    def of(
        cls, section: WorkersSection, *, dtype: str, num_workers: int, on_gpu: bool = False
    ) -> Sharding:
        """Read the settings from the DeepSpeed config that the workers will get."""
        config = deepspeed_config(section, dtype=dtype, num_workers=num_workers, on_gpu=on_gpu)
        zero = config["zero_optimization"]

        def is_off(name: str) -> bool:
            return (zero.get(name) or {}).get("device", "none") not in ("none", None)

        return cls(
            stage=int(zero["stage"]),
            workers=num_workers,
            offload_optimizer=is_off("offload_optimizer"),
            offload_param=is_off("offload_param"),
            on_gpu=on_gpu,
            overlap_comm=(section.deepspeed.get("zero_optimization") or {}).get("overlap_comm"),
            reduce_bucket=int(float(zero.get("reduce_bucket_size", REDUCE_BUCKET))),
            max_live=int(float(zero.get("stage3_max_live_parameters", MAX_LIVE))),
        )

    @property
    def overlaps(self) -> bool:
        """True if DeepSpeed communicates in streams of its own while the model computes.

        Stage 2 then has a second bucket. The default is False on CPUs, which have no streams, and
        for a single worker at stage 2, which communicates nothing. A single worker at stage 3 does
        not either, but without a separate stream DeepSpeed (0.19) waits for all computation
        whenever a layer fetches its weights.
        """
        # Below stage 2 DeepSpeed refuses overlap together with unmanaged accumulation.
        if self.stage < OVERLAPPED_STAGE:
            return False
        if self.overlap_comm is not None:
            return self.overlap_comm
        return self.on_gpu and (self.workers > 1 or self.stage == 3)

    def __str__(self) -> str:
        moved = [
            w
            for w, on in (("optimizer", self.offload_optimizer), ("weights", self.offload_param))
            if on
        ]
        return f"{self.stage}" + (f" + {' and '.join(moved)} off-loaded" if moved else "")


def deepspeed_config(
    section: WorkersSection, *, dtype: str, num_workers: int, on_gpu: bool = False
) -> dict[str, Any]:
    """Generate the DeepSpeed config and merge `learner.deepspeed` over it.

    In bfloat16, master weights and gradient sums over micro-batches are float32 at every stage.
    DeepSpeed's own stage 0 cannot do that: FP16_UnfusedOptimizer sums in bfloat16, and its first
    Adam updates are too small. So stage 0 runs as DeepSpeed's stage 1, whose updates are the same.

    Args:
        section: Settings of optimizer and ZeRO.
        dtype: float32 or bfloat16.
        num_workers: Number of workers that train the model.
        on_gpu: True if the workers have GPUs, whose streams can reduce gradients during the
            backward pass.
    """
    # A single worker shards nothing. Stages 1 and 2 would give the same updates as stage 0, but
    # copy gradients into buckets and partitions.
    is_alone = num_workers == 1 and section.zero_stage < 3
    stage = 0 if is_alone and not section.deepspeed.get("zero_optimization") else section.zero_stage
    generated: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        # Stages 2 and 3 would clip Muon's orthogonal updates in place of gradients.
        "gradient_clipping": 0.0 if section.optimizer == "muon" else section.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW steps on CPUs too
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bfloat16", "check_grad_overflow": True},
        "steps_per_print": None,
        # The timer would synchronise the device before and after every forward pass.
        "timers": {"throughput": {"enabled": False}},
    }
    if section.optimizer == "muon":  # Muon needs whole gradients
        generated["zero_optimization"]["reduce_scatter"] = False
    if dtype == "bfloat16":
        generated["data_types"] = {"grad_accum_dtype": "fp32"}
    merged = OmegaConf.to_container(OmegaConf.merge(generated, section.deepspeed))
    assert isinstance(merged, dict)
    config = {str(key): value for key, value in merged.items()}
    zero = config["zero_optimization"]
    if dtype == "bfloat16" and zero["stage"] <= 1:
        zero["stage"] = 1
        # Stage 1 communicates sums at the end of a step, which must not be rounded. Stages 2 and 3
        # communicate each micro-batch's gradients, which are bfloat16 already, and add in float32.
        config.setdefault("communication_data_type", "fp32")
    # This comes last because the rule needs the stage that DeepSpeed will see. At stage 3 DeepSpeed
    # would take null as true.
    if zero.get("overlap_comm") is None:
        default = Sharding(int(zero["stage"]), num_workers, on_gpu=on_gpu)
        zero["overlap_comm"] = default.overlaps
    return config
