"""How DeepSpeed is set up, and what of that decides over memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from raypo.config import WorkersSection

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
    overlaps: bool = False
    """Gradients are summed while the backward pass goes on: stage 2 then has a second bucket."""
    reduce_bucket: int = REDUCE_BUCKET
    max_live: int = MAX_LIVE

    @classmethod
    def of(
        cls, section: WorkersSection, *, dtype: str, num_workers: int, on_gpu: bool = False
    ) -> Sharding:
        """What `learner.zero_stage` and `learner.deepspeed` say together."""
        config = deepspeed_config(section, dtype=dtype, num_workers=num_workers, on_gpu=on_gpu)
        zero = config["zero_optimization"]

        def is_off(name: str) -> bool:
            return (zero.get(name) or {}).get("device", "none") not in ("none", None)

        return cls(
            stage=int(zero["stage"]),
            workers=num_workers,
            offload_optimizer=is_off("offload_optimizer"),
            offload_param=is_off("offload_param"),
            overlaps=bool(zero["overlap_comm"]),
            reduce_bucket=int(float(zero.get("reduce_bucket_size", REDUCE_BUCKET))),
            max_live=int(float(zero.get("stage3_max_live_parameters", MAX_LIVE))),
        )

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
    """The generated DeepSpeed config with `learner.deepspeed` merged over it.

    A single worker shards nothing: its stages 1 and 2 are stage 0, whose updates are the same, and
    whose gradients are not copied into buckets and partitions.

    In bfloat16 sums over micro-batches and master weights are float32 at every stage. DeepSpeed's
    own stage 0 cannot: FP16_UnfusedOptimizer sums in bfloat16, and its first Adam updates are too
    small. So stage 0 is DeepSpeed's stage 1 there, whose updates are the same; and what stage 1
    sends at the end of a step are sums, which must not be rounded.

    Args:
        on_gpu: Gradients are summed while the backward pass goes on, on a stream of their own.
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
        "zero_optimization": {"stage": stage, "overlap_comm": on_gpu},
        "bf16": {"enabled": dtype == "bfloat16", "check_grad_overflow": True},
        "steps_per_print": None,
    }
    if dtype == "bfloat16":
        generated["data_types"] = {"grad_accum_dtype": "fp32"}
    merged = OmegaConf.to_container(OmegaConf.merge(generated, section.deepspeed))
    assert isinstance(merged, dict)
    config = {str(key): value for key, value in merged.items()}
    if dtype == "bfloat16" and config["zero_optimization"]["stage"] <= 1:
        config["zero_optimization"]["stage"] = 1
        config.setdefault("communication_data_type", "fp32")
    return config
