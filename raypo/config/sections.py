"""The sections that every recipe's run file is made of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from raypo.config.base import Config
from raypo.config.sources import HeldOutSources, TrainedSources, one_or_many

OVERLAPPED_STAGE = 2
"""Lowest ZeRO stage at which DeepSpeed sums gradients during the backward pass
(`DeepSpeedEngine._do_sanity_check` of 0.19, where raypo decides when gradients are summed)."""
Paths = Annotated[tuple[str, ...], BeforeValidator(one_or_many)]


class RewardModelEntry(Config):
    """One reward model of a run."""

    path: str
    """A sequence classifier with one label and its trained head: a Hugging Face folder or a hub
    id."""
    weight: float = 1.0
    """What its score is multiplied by before the models' scores are added."""


def _reward_models(value: Any) -> Any:
    """A path, an entry, or a list of either, as a list of entries."""
    if value is None:
        return None
    items = value if isinstance(value, list | tuple) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


RewardModels = Annotated[
    Annotated[tuple[RewardModelEntry, ...], Field(min_length=1)] | None,
    BeforeValidator(_reward_models),
]


class LoraSection(Config):
    """Low-rank adapters: the model's own weights stay, W x + alpha / rank * B A x is trained.

    Dropout is not offered: old and new log-probs must be of one function.
    Paper: Hu et al. 2021, arXiv:2106.09685, eq. 3.
    """

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0.0)
    """Numerator of the scale alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] | Literal["all-linear"] = (
        "all-linear"
    )
    """Names of linear layers, like [q_proj, v_proj]; all-linear: each one but the output head. A
    mixture of experts needs names, for its experts are no linear layers; a vision tower gets no
    adapter."""

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return self.alpha / self.rank


class PolicyLoraSection(LoraSection):
    """Adapters of a policy and its critic."""

    critic: Literal["adapter", "head"] = "adapter"
    """What the critic learns besides its value head: an adapter of its own, or nothing."""
    push: Literal["merged", "adapter"] = "merged"
    """What engines get: the merged weights, or the base once and then only the adapter. Merged
    samples faster, an adapter is pushed faster."""


Dtype = Literal["auto", "float32", "bfloat16"]
Attention = Literal[
    "auto", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"
]


class ModelSection(Config):
    """Which models a run is made of; every path is a Hugging Face folder or a hub id."""

    policy: str
    """The model to align."""
    critic: str | None = None
    """Backbone of the critic; null: the first reward model's, with its score head times its
    weights, where there is one with the policy's vocabulary, else the policy's with a value head
    that starts at zero."""
    reward: RewardModels = None
    """A reward model, or a list of them, each a path or {path, weight}."""
    reference: str | None = None
    """The model that the KL penalty pulls to, with the policy's tokenizer; null: the policy as it
    was at the start."""
    dtype: Dtype = "auto"
    """Of the policy, the engine and the frozen models. Value and score heads, sums of gradients,
    master weights and AdamW's moments are float32 always. auto: bfloat16 where the learner workers
    have GPUs, else float32; the run's config.yaml says which. float32 is exact on CPUs; bfloat16 is
    faster on GPUs, and on CPUs with AMX or avx512_bf16."""
    attention: Attention = "auto"
    """Attention of all passes of the torch models. auto: raypo's own over packed rows, where a
    prompt is read once and nothing is padded: flex attention on GPUs, SDPA on CPUs; transformers'
    choice for a model that it cannot stand in for. A name: transformers' attention of that name,
    which reads a padded row for each response. flash_attention_2 and 3 need GPUs and packages of
    their own."""
    lora: PolicyLoraSection | None = None
    """Train adapters; {} for the defaults, null: all weights. Without model.reference the policy
    with its adapter off is the reference, and no other model is loaded for it."""

    @property
    def is_own_reference(self) -> bool:
        """Whether the learner's policy, its adapter off, is the reference."""
        return self.lora is not None and self.reference is None


class DataSection(Config):
    """Where prompts come from."""

    prompts: TrainedSources = Field(min_length=1)
    """Files (jsonl, json, parquet, csv) by path, pattern (data/*.jsonl, in the order of their
    names) or URI (s3://, gs://, file://, what pyarrow opens), folders that the `save_to_disk` of
    `datasets` wrote, Hugging Face data sets by their id, and tasks of reasoning-gym:
    reasoning_gym://chain_sum?size=2000&seed=0. One, or a list of them; in place of each the keys
    below, like {path, weight}."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages (then the chat template), which
    may stand there as JSON text, as it must in a csv file."""
    label_key: str | None = None
    """Column handed to reward functions as `rollout.label`."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """System message that is put before each row's chat messages, which must not bring one of their
    own; prompts that are plain text have no place for it, and are refused."""
    tools_key: str | None = None
    """Column of the tools that the chat template describes: a list of JSON schemas, or its JSON
    text; null: none. Environments and agents name their own."""
    max_prompt_tokens: int = Field(default=256, ge=1)
    """Longest prompt in tokens."""
    too_long: Literal["skip", "error"] = "skip"
    """What happens to longer prompts: skip (and count) or error."""
    on_error: Literal["refuse", "drop"] = "refuse"
    """What happens to a row that cannot be used (a broken line, a missing column, a message that is
    none, a response with an end token in the middle): refuse to start, or drop it. The console says
    how many were dropped, and names file and line of the first found."""


class RewardWeights(Config):
    """How much each kind of judge counts: the score is the weighted sum."""

    function: float = 1.0
    """Weight of the score of `reward.function`."""
    model: float = 1.0
    """Weight of the sum over the scores of `model.reward`."""
    url: float = 1.0
    """Weight of the score of the servers of `reward.url`."""


class RewardRequestSection(Config):
    """How reward servers are asked."""

    batch_size: int = Field(default=16, ge=1)
    """Most samples of a request."""
    max_concurrent: int = Field(default=8, ge=1)
    """Most requests under way from one learner worker, over all servers."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """Seconds that one attempt may take."""
    max_attempts: int = Field(default=5, ge=1)
    """Attempts a request, with growing waits, before its samples count as failed."""


class RewardSection(Config):
    """How responses are judged."""

    function: str | None = None
    """`file.py:name` or `package.module:name`; (list[Rollout]) -> list[float]."""
    processes: int = Field(default=0, ge=0)
    """Processes that a slow function runs in, a few prompts a call, on each learner worker; 0: it
    runs in the worker itself and sees all of its rollouts at once."""
    timeout_s: float | None = Field(default=1800.0, gt=0.0)
    """Seconds that one call may take; null: any. One in a process of its own is ended, and its
    samples count as failed; one in the worker itself cannot be, so the run stops."""
    url: Paths | None = None
    """Reward server, or several that share the work: addresses that `samples` are posted to."""
    request: RewardRequestSection = RewardRequestSection()
    weights: RewardWeights = RewardWeights()
    """Function, reward models and servers add, each multiplied by its weight."""
    max_failed_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of a step's samples that may go without a score (None, NaN) before the run stops."""

    def _problems(self) -> Iterator[str]:
        if self.request != RewardRequestSection() and self.url is None:
            yield "reward.request: has no effect, reward.url is null. Set reward.url, or remove it."
        for url in self.url or ():
            if not re.fullmatch(r"https?://[^/\s]+\S*", url):
                yield (
                    f"reward.url ({url}): must begin with http:// or https:// and name a host. "
                    "Write it like http://127.0.0.1:8000/score."
                )


Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class WorkersSection(Config):
    """Learner workers and their DeepSpeed, whatever they train."""

    section = "learner."

    num_workers: int = Field(default=1, ge=1)
    """Ray Train workers."""
    use_gpu: bool | Literal["auto"] = "auto"
    """auto: where the cluster has GPUs."""
    cpus_per_worker: int = Field(default=1, ge=1)
    """CPU cores of a worker's bundle, and its threads; engine and reference take turns on them."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rates after the warm-up: constant, or down to `lr_floor` at num_steps, on a line or
    half a cosine."""
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Steps on which learning rates rise from zero on a line, fewer than the run has; a policy's
    begin when its critic has warmed up (ppo.critic_warmup_steps)."""
    lr_floor: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the highest rate that a schedule falls to."""
    adam_betas: tuple[Beta, Beta] = (0.9, 0.999)
    """AdamW's decay rates of the two moments (arXiv:1711.05101)."""
    adam_eps: float = Field(default=1e-8, gt=0.0)
    """What AdamW adds to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Gradients are clipped to this global norm."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """What DeepSpeed shards: 0 nothing, 1 optimizer, 2 also gradients, 3 also weights. One worker
    shards nothing: there 1 and 2 run as 0. In bfloat16 0 runs as 1, whose updates are the same:
    DeepSpeed's own 0 would sum gradients in bfloat16."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Tokens of one forward and backward pass; a prompt of several responses counts once. auto:
    4096 on CPUs, on GPUs the most of 16384, 8192 and 4096 that fits (`raypo plan` says which); a
    sequence that is longer has a pass to itself."""
    activation_checkpointing: bool = False
    """Keep only the inputs of a model's layers and compute the rest once more in the backward pass:
    about a third more time for a fraction of the memory. The gradients are the same."""
    max_skipped_updates: int = Field(default=3, ge=0)
    """Non-finite updates in a row that are skipped before the run stops."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """Merged over the generated DeepSpeed config. `zero_optimization.overlap_comm` needs stage 2 or
    3; where it is not set, it is on for several workers with GPUs at these stages."""

    @property
    def microbatch_tokens(self) -> int:
        """`max_tokens_per_microbatch`, 4096 where it is not decided."""
        tokens = self.max_tokens_per_microbatch
        return 4096 if tokens == "auto" else tokens

    @property
    def total_workers(self) -> int:
        """Workers of the group, whatever they train."""
        return self.num_workers

    def _problems(self) -> Iterator[str]:
        if self.lr_schedule == "constant":
            why = "learner.lr_schedule is constant"
            yield from self._idle("lr_floor", why, "set learner.lr_schedule to linear or cosine")
        yield from self._deepspeed_problems()

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
                f"{key}.overlap_comm ({zero['overlap_comm']}): DeepSpeed overlaps sums of "
                f"gradients with the backward pass only at ZeRO stages 2 and 3, and the stage is "
                f"{stage}. Remove it, or set learner.zero_stage to 2 or 3."
            )

    def endless_warmup(self, count: int, keys: str) -> Iterator[str]:
        """The problem of a warm-up that is never over.

        Args:
            count: Steps that the rates follow.
            keys: The config keys that say so, in words.
        """
        if self.lr_warmup_steps >= count:
            yield (
                f"learner.lr_warmup_steps ({self.lr_warmup_steps}): the rates would never reach "
                f"their highest in {count} steps ({keys}). Set learner.lr_warmup_steps to at most "
                f"{count - 1}, or num_steps higher."
            )

    def no_room_for(self, longest: int, keys: str) -> Iterator[str]:
        """The problem of sequences that are longer than a microbatch.

        Args:
            longest: Tokens that one sequence may have.
            keys: The config keys that say so, in words.
        """
        if self.max_tokens_per_microbatch != "auto" and longest > self.microbatch_tokens:
            yield (
                f"learner.max_tokens_per_microbatch ({self.max_tokens_per_microbatch}): one "
                f"sequence may have {longest} tokens ({keys}). Set "
                f"learner.max_tokens_per_microbatch to at least {longest}, or the other two lower."
            )


class LearnerSection(WorkersSection):
    """The workers that hold policy and critic under DeepSpeed."""

    critic_workers: int = Field(default=0, ge=0)
    """Ray Train workers that hold only the critic, beside `num_workers` that then hold only the
    policy: the two are updated at the same time. 0: `num_workers` hold both. The numbers of a step
    are the same."""
    policy_lr: float = Field(default=1e-6, ge=0.0)
    """Highest learning rate of the policy (AdamW)."""
    critic_lr: float = Field(default=1e-5, ge=0.0)
    """Highest learning rate of the critic (AdamW)."""
    save_critic: bool = False
    """Keep the critic too, as the run's `critic/`: a folder that `model.critic` takes."""
    peak_tflops: float | None = Field(default=None, gt=0.0)
    """Most TFLOP/s of a worker's device in `model.dtype`, which `perf/mfu` is measured against;
    null: of the data sheet of a known GPU, else measured by a matrix product at the start."""

    @property
    def total_workers(self) -> int:
        """Workers of the group, those of the policy and those of the critic."""
        return self.num_workers + self.critic_workers


class Periodic(Config):
    """A section of what is done every so many steps, and after the last one."""

    if TYPE_CHECKING:  # a field of each such section, with a default of its own
        every: int

    def is_due(self, step: int, *, last_step: int) -> bool:
        """Whether it is due after `step` (counted from 1)."""
        return step % self.every == 0 or step == last_step


class EvalSection(Periodic):
    """Held-out prompts, judged as the run goes."""

    prompts: HeldOutSources | None = None
    """Sources like data.prompts, with the same columns; null: no evaluation."""
    function: str | None = None
    """What `eval/score_mean` means; null: reward.function, else the reward models."""
    timeout_s: float | None = Field(default=1800.0, gt=0.0)
    """Seconds that one call of such a function may take before the run stops; null: any."""
    every: int = Field(default=10, ge=1)
    """Steps between evaluations; the first is before the first update, the last after the last."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Responses sampled for each held-out prompt."""
    temperature: float | None = Field(default=None, ge=0.0)
    """null: as the rollouts; 0 is greedy."""
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """k of pass@k (arXiv:2107.03374), at most samples_per_prompt; a score of 1 or more passes."""

    def _problems(self) -> Iterator[str]:
        if self.pass_at and max(self.pass_at) > self.samples_per_prompt:
            yield (
                f"eval.pass_at ({list(self.pass_at)}): pass@k needs k samples of a prompt, and "
                f"eval.samples_per_prompt is {self.samples_per_prompt}. Set "
                f"eval.samples_per_prompt to at least {max(self.pass_at)}."
            )


class CheckpointSection(Periodic):
    """When the whole state is saved."""

    section = "checkpoint."

    every: int = Field(default=10, ge=1)
    """Steps between checkpoints; the last step always has one."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept; with `best_by` so many of the best, and the newest."""
    best_by: str | None = None
    """Metric, like eval/score_mean: a step at which it is better than ever before has a checkpoint,
    and the models of the best one stand in `best/`; null: only the newest count."""
    best_mode: Literal["max", "min"] = "max"
    """Whether the best is the largest or the smallest."""
    changed_inputs: Literal["refuse", "accept"] = "refuse"
    """What happens when a run resumes and a data file, a Python file or a model that its config
    names has changed since the run began: refuse, or accept, which goes on and notes in
    `summary.json` what has changed and after which step."""

    def _problems(self) -> Iterator[str]:
        if self.best_by is None:
            why, remedy = "checkpoint.best_by is null", "set checkpoint.best_by to a metric"
            yield from self._idle("best_mode", why, remedy)


class StopSection(Config):
    """What ends a run before its last step, with a checkpoint; each rule that is set can."""

    section = "stop."

    metric: str = "eval/score_mean"
    """What `at` and `patience` look at, each time that it is measured."""
    mode: Literal["max", "min"] = "max"
    """Whether the metric is to be large or small."""
    at: float | None = None
    """The run is done once the metric is so large (mode min: so small)."""
    patience: int | None = Field(default=None, ge=1)
    """The run is done once so many measurements in a row were not better than the best before."""
    min_change: float = Field(default=0.0, ge=0.0)
    """What counts as better for `patience`: by more than this."""
    after_s: float | None = Field(default=None, gt=0.0)
    """The command ends after the step that is under way so many seconds after its start, as at
    Ctrl-C; the same command goes on. For machines that are had for a while."""

    @property
    def watches(self) -> bool:
        """Whether a metric can end the run."""
        return self.at is not None or self.patience is not None

    def _problems(self) -> Iterator[str]:
        if self.patience is None:
            yield from self._idle("min_change", "stop.patience is null", "set stop.patience")
        if not self.watches:
            why = "neither stop.at nor stop.patience is set"
            yield from self._idle("metric mode", why, "set one of them")


class ClusterSection(Config):
    """Which Ray cluster."""

    address: str | None = None
    """host:port, or auto: the Ray that runs on this machine; null: RAY_ADDRESS, else a local Ray
    with the dashboard on that ends with the command."""
    namespace: str = "raypo"
    """Ray namespace of the actors; after a `ray.init` of your own, that of its call."""


class WandbSection(Config):
    """Weights & Biases; needs the package wandb."""

    project: str = "raypo"
    """The project there."""
    entity: str | None = None
    """User or team; null: the default of the account."""
    mode: Literal["online", "offline"] = "online"
    """offline: write into the run folder; `wandb sync` sends it later."""


class MLflowSection(Config):
    """MLflow; needs the package mlflow."""

    experiment: str = "raypo"
    """The experiment there."""
    tracking_uri: str | None = None
    """A server (http://...) or database (sqlite:///mlflow.db); null: MLFLOW_TRACKING_URI."""


class LoggingSection(Config):
    """Where metrics go besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files into the run folder."""
    prometheus: bool = True
    """Set gauges with labels run and trial on Ray's metrics endpoint: see `raypo monitor`."""
    wandb: WandbSection | None = None
    """Send the metrics to Weights & Biases; {} for the defaults, null: off."""
    mlflow: MLflowSection | None = None
    """Send the metrics to MLflow; {} for the defaults, null: off."""
