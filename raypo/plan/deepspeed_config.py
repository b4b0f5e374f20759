"""How DeepSpeed is set up, and what of that decides over memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from raypo.config import OVERLAPPED_STAGE, WorkersSection

REDUCE_BUCKET = 500_000_000
"""Elements; DeepSpeed's zero_optimization.reduce_bucket_size."""
MAX_LIVE = 1_000_000_000
"""Elements; DeepSpeed's zero_optimization.stage3_max_live_parameters."""


@dataclass(frozen=True)
class Sharding:
    """How DeepSpeed holds a model that is trained: what its config says of memory."""

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
        """Read it from the DeepSpeed config that the workers will get."""
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
        """Gradients are summed during the backward pass: stage 2 then has a second bucket.

        Only where streams and several workers are: a worker alone sums nothing. Below stage 2
        DeepSpeed refuses it together with unmanaged accumulation.
        """
        if self.stage < OVERLAPPED_STAGE:
            return False
        is_default = self.overlap_comm is None
        return self.on_gpu and self.workers > 1 if is_default else bool(self.overlap_comm)

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

    A single worker shards nothing: its stages 1 and 2 are stage 0, whose updates are the same, and
    whose gradients are not copied into buckets and partitions.

    In bfloat16 sums over micro-batches and master weights are float32 at every stage. DeepSpeed's
    own stage 0 cannot: FP16_UnfusedOptimizer sums in bfloat16, and its first Adam updates are too
    small. So stage 0 is DeepSpeed's stage 1 there, whose updates are the same; and what stage 1
    sends at the end of a step are sums, which must not be rounded. Stages 2 and 3 send each
    micro-batch's gradients, which are bfloat16 already, and add what arrives in float32.

    Args:
        on_gpu: The workers have GPUs, whose streams can sum gradients during the backward pass.
    """
    is_alone = num_workers == 1 and section.zero_stage < 3
    stage = 0 if is_alone and not section.deepspeed.get("zero_optimization") else section.zero_stage
    generated: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": section.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW steps on CPUs too
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bfloat16", "check_grad_overflow": True},
        "steps_per_print": None,
        # The timer would synchronise the device before and after every forward pass.
        "timers": {"throughput": {"enabled": False}},
    }
    if dtype == "bfloat16":
        generated["data_types"] = {"grad_accum_dtype": "fp32"}
    merged = OmegaConf.to_container(OmegaConf.merge(generated, section.deepspeed))
    assert isinstance(merged, dict)
    config = {str(key): value for key, value in merged.items()}
    zero = config["zero_optimization"]
    if dtype == "bfloat16" and zero["stage"] <= 1:
        zero["stage"] = 1
        config.setdefault("communication_data_type", "fp32")
    # Last, for the rule needs the stage that DeepSpeed will see. Null would be true at stage 3.
    if zero.get("overlap_comm") is None:
        told = Sharding(int(zero["stage"]), num_workers, on_gpu=on_gpu)
        zero["overlap_comm"] = told.overlaps
    return config
