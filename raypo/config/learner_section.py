"""The section `learner`: workers, optimizer and DeepSpeed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from raypo.config.base import Config
from raypo.config.only_if import only_if

OVERLAPPED_STAGE = 2
"""Lowest ZeRO stage at which DeepSpeed reduces gradients during the backward pass. This holds for
callers that decide when gradients are reduced, as raypo does (`DeepSpeedEngine._do_sanity_check` of
0.19)."""
DEEPSPEED_KEYS = {
    "optimizer": "learner.optimizer, the learning rates and adam_* keys of learner",
    "scheduler": "learner.lr_schedule and learner.lr_warmup_steps",
    "gradient_clipping": "learner.max_grad_norm",
    "fp16": "model.dtype to bfloat16",
    "train_batch_size": "the batch sizes of the recipe",
    "train_micro_batch_size_per_gpu": "learner.max_tokens_per_microbatch",
    "gradient_accumulation_steps": "learner.max_tokens_per_microbatch",
}
"""Keys of DeepSpeed's config that raypo sets -> the keys that determine them."""
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class WorkersSection(Config):
    """Learner workers and DeepSpeed, for every recipe."""

    num_workers: int = Field(default=1, ge=1)
    """Number of Ray Train workers. `[low, high]` makes the run elastic: it sets `min_workers` to
    low and this key to high."""
    min_workers: int | None = Field(default=None, ge=1)
    """Minimum number of workers of an elastic run, both at the start and after nodes are lost. The
    run grows up to `num_workers` as soon as there is room. Each change restarts the workers from
    the last checkpoint. null means that all `num_workers` are needed."""
    use_gpu: bool | Literal["auto"] = "auto"
    """Use GPUs. auto: use them if the cluster has any."""
    cpus_per_worker: int = Field(default=1, ge=1)
    """CPU cores of each worker's bundle, and the number of the worker's threads. Engine and
    reference use the same cores in turns."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up. constant: it does not change; linear, cosine: it decays to
    `lr_floor` at num_steps, along a line or half a cosine."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Number of steps of linear learning-rate warm-up from zero. It must be below the number of
    steps of the run. The learning-rate warm-up of a policy begins after ppo.critic_warmup_steps."""
    lr_floor: Annotated[float, only_if("lr_schedule", "linear", "cosine")] = Field(
        default=0.0, ge=0.0, le=1.0
    )
    """Final learning rate of a schedule, as a fraction of the highest."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer. adamw: arXiv:1711.05101; muon: Muon, with a momentum of 0.95, for the layers'
    linear weights, and AdamW for embeddings, heads, norms and biases. Muon's updates are scaled so
    that learning rates for AdamW can be kept (arXiv:2502.16982), and gradients are not clipped.
    Muon needs whole matrices, so model.lora is refused."""
    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's decay rates of the first and second moment (arXiv:1711.05101)."""
    adam_eps: float = Field(default=1e-8, gt=0.0)
    """Epsilon of AdamW, added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """AdamW's decoupled weight decay. It applies to all weights, norms and biases included, which
    Hugging Face's trainers leave out."""
    max_grad_norm: Annotated[float, only_if("optimizer", "adamw")] = Field(default=1.0, gt=0.0)
    """Global norm to which gradients are clipped."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """ZeRO stage of DeepSpeed. 0 shards nothing, 1 the optimizer state, 2 also the gradients, 3
    also the weights. With one worker there is nothing to shard, so stages 1 and 2 run as 0. In
    bfloat16, stage 0 runs as 1, because DeepSpeed's own stage 0 would sum gradients in bfloat16.
    Otherwise the stage does not change the updates."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Maximum number of tokens of one forward and backward pass; a prompt with several responses
    counts once. auto: 4096 on CPUs, and on GPUs the largest of 32768, 16384, 8192 and 4096 that
    fits (`raypo plan` shows which). With auto, a sequence above the limit gets a separate pass.
    Dedicated reference and reward models start before the learner's GPUs are known, so for them
    auto is 4096."""
    sequence_parallel: int = Field(default=1, ge=1)
    """Number of workers that share the tokens of each row, for rows that do not fit into one
    worker's memory (Ulysses, arXiv:2309.14509). It divides `num_workers`. Neighbouring workers form
    a group, get the same rows, and each computes an equal slice of the tokens, so a pass of a group
    has up to that many times `max_tokens_per_microbatch`. The results are the same except for
    rounding. Models with other layers than full and sliding attention are refused."""
    activation_checkpointing: bool | Literal["offload"] = False
    """Keep only the inputs of the model's layers, and recompute the other activations in the
    backward pass. This takes about a third more time and a fraction of the memory. The gradients
    are the same. offload: on GPUs also move these inputs to the host's memory until the backward
    pass needs them."""
    mlp_tile_tokens: int | None = Field(default=None, ge=1)
    """Compute the MLPs of a pass this many tokens at a time, and again in the backward pass, so
    that their activations exist for these tokens only. For long rows with activation_checkpointing,
    where the MLP of one layer takes most of the memory. Results are the same except for rounding.
    null means that an MLP computes all tokens of a pass together."""
    compile_layers: bool = False
    """On GPUs, compile norms, rotary embeddings and MLPs of the learner, the reference and the
    reward models with torch.compile. Their numbers are the same except for rounding. It has no
    effect at ZeRO stage 3, and on parts with an adapter or of a mixture of experts. Off by default,
    because its gain has not been measured yet; the first step takes longer."""
    router_aux_coef: float = Field(default=0.0, ge=0.0)
    """Coefficient of a loss that balances the load of a mixture's experts (Switch Transformer,
    arXiv:2101.03961 eq. 4). Loads are counted over all tokens after the prompts of the whole
    optimizer step, also over those that other losses leave out (tools, truncated responses), in
    each layer, and the loss is the mean over layers. It needs one more forward pass in each
    optimizer step. 0 means no such loss: it can disturb the training of a model that is balanced
    already."""
    max_skipped_updates: int = Field(default=3, ge=0)
    """Number of consecutive non-finite updates that are skipped before the run stops."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """DeepSpeed options, merged over the generated DeepSpeed config. Optimizer, learning-rate
    scheduler, gradient clipping, fp16 and batch sizes have keys of their own and are refused here.
    `zero_optimization.overlap_comm` needs stage 2 or 3, where it is on by default for workers with
    GPUs, except a single one at stage 2. `zero_optimization.offload_optimizer` needs stage 1 to 3,
    and `zero_optimization.offload_param` stage 3; both accept only the device cpu."""

    @model_validator(mode="before")
    @classmethod
    def _split_range(cls, values: Any) -> Any:
        count = values.get("num_workers") if isinstance(values, Mapping) else None
        if isinstance(count, list | tuple) and len(count) == 2:
            return {**values, "min_workers": count[0], "num_workers": count[1]}
        return values

    @property
    def is_elastic(self) -> bool:
        """True if the number of workers may change during the run."""
        return self.min_workers is not None

    @property
    def microbatch_tokens(self) -> int:
        """`max_tokens_per_microbatch` as a number; 4096 while it is auto."""
        tokens = self.max_tokens_per_microbatch
        return 4096 if tokens == "auto" else tokens

    @property
    def pass_tokens(self) -> int:
        """Maximum number of tokens of one pass over all workers that share them."""
        return self.microbatch_tokens * self.sequence_parallel

    @property
    def total_workers(self) -> int:
        """Number of all learner workers."""
        return self.num_workers

    def _problems(self) -> Iterator[str]:
        if self.min_workers is not None and self.min_workers > self.num_workers:
            yield (
                f"learner.min_workers ({self.min_workers}): must be at most learner.num_workers "
                f"({self.num_workers}). Set it lower."
            )
        yield from self._problems_of_own_keys()
        yield from self._sequence_problems()
        yield from self._deepspeed_problems()
        if self.optimizer == "muon":
            yield from self._muon_problems()

    def _problems_of_own_keys(self) -> Iterator[str]:
        for name, keys in DEEPSPEED_KEYS.items():
            value = self.deepspeed.get(name)
            is_off = isinstance(value, Mapping) and value.get("enabled") is False
            if name in self.deepspeed and not is_off:
                yield (
                    f"learner.deepspeed.{name} ({self.deepspeed[name]}): raypo sets this itself. "
                    f"Remove it, and set {keys}."
                )

    def _sequence_problems(self) -> Iterator[str]:
        size, key = self.sequence_parallel, "learner.sequence_parallel"
        if size > 1 and self.is_elastic:
            yield (
                f"{key} ({size}): needs a fixed number of workers, but learner.min_workers is "
                f"{self.min_workers}. Set one of them to its default."
            )
        critics = self.total_workers - self.num_workers
        for name, count in (("num_workers", self.num_workers), ("critic_workers", critics)):
            if count % size:
                yield (
                    f"{key} ({size}): must divide learner.{name} ({count}), because groups of that "
                    f"many workers share their rows. Set learner.{name} to a multiple of {size}."
                )

    def _deepspeed_problems(self) -> Iterator[str]:
        key = "learner.deepspeed.zero_optimization"
        zero = self.deepspeed.get("zero_optimization", {})
        if not isinstance(zero, dict):
            yield f"{key} ({zero}): must be a mapping. Write it like {{stage: 3}}, or remove it."
            return
        stage = zero.get("stage", self.zero_stage)
        if stage not in range(4):
            yield f"{key}.stage ({stage}): must be 0, 1, 2 or 3. Set learner.zero_stage instead."
        elif zero.get("overlap_comm") and stage < OVERLAPPED_STAGE:
            yield (
                f"{key}.overlap_comm ({zero['overlap_comm']}): DeepSpeed overlaps gradient "
                "reduction with the backward pass only at ZeRO stages 2 and 3, but the stage is "
                f"{stage}. Remove it, or set learner.zero_stage to 2 or 3."
            )
        for name in ("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"):
            if zero.get(name):
                new = "offload_param" if name == "cpu_offload_param" else "offload_optimizer"
                yield (
                    f"{key}.{name} ({zero[name]}): is DeepSpeed's former spelling of {new}. Write "
                    f"{new}: {{device: cpu}} in its place."
                )
        # DeepSpeed silently ignores both at lower stages. Swapping to NVMe is not tested.
        for name, lowest in (("offload_optimizer", 1), ("offload_param", 3)):
            moved = zero.get(name) or {}
            if not isinstance(moved, dict):
                yield f"{key}.{name} ({moved}): must be a mapping. Write it like {{device: cpu}}."
                continue
            device = moved.get("device", "none")
            if device not in ("none", "cpu", None):
                yield f"{key}.{name}.device ({device}): raypo off-loads only to RAM. Set it to cpu."
            elif device == "cpu" and stage in range(lowest):
                yield (
                    f"{key}.{name}.device (cpu): DeepSpeed does this only from ZeRO stage "
                    f"{lowest} on, but the stage is {stage}. Remove it, or set "
                    "learner.zero_stage to 3."
                )

    def _muon_problems(self) -> Iterator[str]:
        key = "learner.deepspeed.zero_optimization"
        zero = self.deepspeed.get("zero_optimization")
        zero = zero if isinstance(zero, dict) else {}
        for name in ("offload_optimizer", "reduce_scatter"):
            if zero.get(name):
                yield (
                    f"{key}.{name} ({zero[name]}): is not supported with learner.optimizer muon. "
                    f"Remove it, or set learner.optimizer to adamw."
                )
        if self.total_workers > self.num_workers:
            yield (
                f"learner.critic_workers ({self.total_workers - self.num_workers}): is not "
                f"supported with learner.optimizer muon. Set it to 0, or learner.optimizer to "
                f"adamw."
            )

    def endless_warmup(self, count: int, keys: str) -> Iterator[str]:
        """Yield a problem if the learning-rate warm-up never ends.

        Args:
            count: Number of steps in the learning-rate schedule.
            keys: Config keys that determine `count`, for the message.
        """
        if self.lr_warmup_steps >= count:
            yield (
                f"learner.lr_warmup_steps ({self.lr_warmup_steps}): the learning rates would not "
                f"reach their peak within {count} steps ({keys}). Set learner.lr_warmup_steps to "
                f"at most {count - 1}, or raise num_steps."
            )

    def no_room_for(self, longest: int, keys: str) -> Iterator[str]:
        """Yield a problem if a sequence can be longer than a microbatch.

        Args:
            longest: Maximum tokens of one sequence.
            keys: Config keys that determine `longest`, for the message.
        """
        if self.max_tokens_per_microbatch != "auto" and longest > self.pass_tokens:
            least = -(-longest // self.sequence_parallel)
            yield (
                f"learner.max_tokens_per_microbatch ({self.max_tokens_per_microbatch}): one "
                f"sequence may have {longest} tokens ({keys}). Set "
                f"learner.max_tokens_per_microbatch to at least {least}, or lower the limits "
                "in parentheses."
            )


class LearnerSection(WorkersSection):
    """Learner workers that train policy and critic with DeepSpeed."""

    critic_workers: Annotated[int, only_if("ppo.advantage", "gae")] = Field(default=0, ge=0)
    """Number of additional Ray Train workers that hold only the critic. The `num_workers` then hold
    only the policy, and policy and critic are updated at the same time. 0 means that the
    `num_workers` hold both models. The results of a step are the same in either case."""
    policy_lr: float = Field(default=1e-6, ge=0.0)
    """Highest learning rate of the policy."""
    critic_lr: float = Field(default=1e-5, ge=0.0)
    """Highest learning rate of the critic."""
    save_critic: Annotated[bool, only_if("ppo.advantage", "gae")] = False
    """Save the critic too, in the folder `critic/` of the run. `model.critic` accepts this folder.
    """
    peak_tflops: float | None = Field(default=None, gt=0.0)
    """Peak TFLOP/s of a worker's device in `model.dtype`, the denominator of `perf/mfu`. null means
    the data sheet's value for a known GPU. For another device it means the rate of a matmul that is
    measured at the start."""

    @property
    def total_workers(self) -> int:
        """Number of all learner workers, including those that hold only the critic."""
        return self.num_workers + self.critic_workers

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.is_elastic and self.critic_workers:
            yield (
                f"learner.critic_workers ({self.critic_workers}): needs a fixed number of "
                f"workers, but learner.min_workers is {self.min_workers}. Set one of them to its "
                "default."
            )
