"""Config sections that several recipes share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from raypo.config.base import Config
from raypo.config.sources import HeldOutSources, TrainedSources, one_or_many

OVERLAPPED_STAGE = 2
"""Lowest ZeRO stage at which DeepSpeed reduces gradients during the backward pass. This holds for
callers that decide when gradients are reduced, as raypo does (`DeepSpeedEngine._do_sanity_check` of
0.19)."""
Paths = Annotated[tuple[str, ...], BeforeValidator(one_or_many)]


class RewardModelEntry(Config):
    """A reward model and its weight."""

    path: str
    """Sequence classifier with one label and a trained head: a Hugging Face folder or a hub id."""
    weight: float = 1.0
    """Factor on the model's score in the sum over all reward models."""


def _reward_models(value: Any) -> Any:
    """Return reward models as a list of mappings. Each may be given as a path or as a mapping."""
    if value is None:
        return None
    items = value if isinstance(value, list | tuple) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


RewardModels = Annotated[
    Annotated[tuple[RewardModelEntry, ...], Field(min_length=1)] | None,
    BeforeValidator(_reward_models),
]


class LoraSection(Config):
    """Low-rank adapters. In W x + alpha / rank * B A x, only A and B are trained.

    Dropout is not offered, because old and new log-probs must come from the same function.

    Paper: Hu et al. 2021, arXiv:2106.09685, eq. 3.
    """

    rank: int = Field(default=16, ge=1)
    """Rank of the adapters: rows of A and columns of B."""
    alpha: float = Field(default=32.0, gt=0.0)
    """Numerator of the scale alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] | Literal["all-linear"] = (
        "all-linear"
    )
    """Names of the linear layers that get an adapter, like [q_proj, v_proj]. all-linear: every
    linear layer except the output head. A mixture-of-experts model needs names, because its experts
    are not linear layers. A vision tower gets no adapter."""

    @property
    def scale(self) -> float:
        """Scale alpha / rank of the product B A x."""
        return self.alpha / self.rank


class PolicyLoraSection(LoraSection):
    """Adapters of the policy and its critic."""

    critic: Literal["adapter", "head"] = "adapter"
    """Parts of the critic that are trained. adapter: a separate adapter and the value head; head:
    only the value head."""
    push: Literal["merged", "adapter"] = "merged"
    """Weights that are pushed to the engines. merged: the whole model with the adapter merged in;
    adapter: the base model once, then only the adapter. merged samples faster, adapter is pushed
    faster."""


Dtype = Literal["auto", "float32", "bfloat16"]
Attention = Literal[
    "auto", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"
]


class SampledModelSection(Config):
    """The models of a run that samples. Every path is a Hugging Face folder or a hub id."""

    gone: ClassVar[Mapping[str, str]] = {
        "critic": "This recipe trains no critic. Remove it.",
        "reference": "This recipe has no reference model. Remove it.",
    }

    policy: str
    """Model to train."""
    reward: RewardModels = None
    """Reward model, or a list of them; each is a path or {path, weight}."""
    dtype: Dtype = "auto"
    """Data type of the policy, the engine and the frozen models. auto: bfloat16 if the learner
    workers have GPUs, else float32; the run's config.yaml records which. float32 is exact on CPUs;
    bfloat16 is faster on GPUs, and on CPUs with AMX or avx512_bf16. Value and score heads, gradient
    sums, master weights and AdamW's moments are always float32."""
    attention: Attention = "auto"
    """Attention implementation of all passes of the torch models. auto: raypo's own implementation
    over packed rows (flex attention on GPUs, SDPA on CPUs), which reads each prompt once and needs
    no padding. If the model does not support packed rows, auto is transformers' default. Any other
    value: the implementation of that name in transformers, with one padded row per response.
    flash_attention_2 and flash_attention_3 need GPUs and extra packages."""
    lora: PolicyLoraSection | None = None
    """Train LoRA adapters; {} means the default adapters, null means that all weights are trained.
    """


class ReferenceModelSection(SampledModelSection):
    """The models of a run with a reference. Every path is a Hugging Face folder or a hub id."""

    reference: str | None = None
    """Reference model of the KL penalty or of the DPO loss. It needs the policy's tokenizer. null
    means the initial policy. With model.lora that is the policy with its adapter off, and no second
    model is loaded."""

    @property
    def is_own_reference(self) -> bool:
        """True if the reference is the learner's policy with its adapter off."""
        return self.lora is not None and self.reference is None


class ModelSection(ReferenceModelSection):
    """The models of a run. Every path is a Hugging Face folder or a hub id."""

    critic: str | None = None
    """Backbone of the critic. null means the first reward model that has the policy's vocabulary.
    The value head is then the score head of this reward model, times its weight and
    reward.weights.model. If there is no such reward model, null means the policy with a value head
    that starts at zero."""


class DataSection(Config):
    """Prompt data."""

    prompts: TrainedSources = Field(min_length=1)
    """Source of prompts, or a list of sources. A source is one of these: a file (jsonl, json,
    parquet, csv) by path, by pattern (data/*.jsonl, in the order of the names) or by URI (s3://,
    gs://, abfs://, hdfs://, hf://, file://, and fsspec+ before a scheme of fsspec, like
    fsspec+sftp://); a folder that `save_to_disk` of `datasets` wrote; the id of a Hugging Face data
    set; or a reasoning-gym task like reasoning_gym://chain_sum?size=2000&seed=0. Instead of a path,
    a source can be a mapping with the keys below, like {path, weight}."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of chat messages, to which the chat template is
    applied. The list may be JSON text (in a csv file it must be)."""
    label_key: str | None = None
    """Column that reward functions get as `rollout.label`. null means no label. All columns are in
    `rollout.row`."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """System message that is put before the chat messages of each row. Rows that already have a
    system message, and prompts that are plain text, are refused. null means that no message is
    added."""
    tools_key: str | None = None
    """Column of the tools that the chat template describes: a list of JSON schemas, or that list as
    JSON text. null means no tools. Environments and agents define their own tools."""
    max_prompt_tokens: int = Field(default=256, ge=1)
    """Maximum prompt length in tokens."""
    too_long: Literal["skip", "error"] = "skip"
    """Treatment of longer prompts. skip: leave them out and count them; error: stop with an error.
    """
    on_error: Literal["refuse", "drop"] = "refuse"
    """Treatment of an invalid row (a broken line, a missing column, an invalid message, a response
    with an end token in the middle). refuse: do not start; drop: leave the row out. The console
    reports how many rows were dropped, with file and line of the first."""

    @field_validator("label_key", mode="before")
    @classmethod
    def _is_one_column(cls, value: Any) -> Any:
        if isinstance(value, list | tuple):
            raise ValueError(
                "must be one column. Name one, or omit label_key: reward functions get every "
                "column as rollout.row."
            )
        return value


class CurriculumSection(Config):
    """Choice of prompts by their predicted pass rate.

    Paper: Qu et al. 2025 (MoPPS), arXiv:2507.04632.
    """

    target: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Pass rate to aim at: a step takes the prompts whose predicted pass rates are closest."""
    pass_score: float = 1.0
    """Lowest score of a sample that passes. The default suits verifiers that return 0 or 1."""
    memory: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount on the earlier results of a prompt each time that it is sampled again. 1: all
    samples count equally; below 1: recent samples count more, because the policy changes."""


class RatedDataSection(DataSection):
    """Prompt data of a run that may choose its prompts by their difficulty."""

    curriculum: CurriculumSection | None = None
    """Choose prompts by their predicted pass rate instead of in shuffled epochs; {} means the
    defaults. It helps if a run samples each prompt several times. null means shuffled epochs."""


class RewardWeights(Config):
    """Weights of the kinds of reward. The score is the weighted sum."""

    function: float = 1.0
    """Weight of the score of `reward.function`."""
    model: float = 1.0
    """Weight of the sum of the scores of `model.reward`."""
    url: float = 1.0
    """Weight of the score of the servers of `reward.url`."""
    judge: float = 1.0
    """Weight of the score of `reward.judge`."""


class RewardRequestSection(Config):
    """Requests to reward servers and judges."""

    batch_size: int = Field(default=16, ge=1)
    """Maximum number of samples per request to `reward.url`. A request to a judge has one criterion
    of one sample."""
    max_concurrent: int = Field(default=8, ge=1)
    """Maximum number of requests in flight per learner worker: to all servers of `reward.url`
    together, and to all servers of `reward.judge` together."""
    timeout_s: float = Field(default=60.0, gt=0.0)
    """Timeout of one attempt, in seconds."""
    max_attempts: int = Field(default=5, ge=1)
    """Maximum number of attempts per request, with increasing waits between them. After the last
    attempt the samples of the request count as failed."""


class Criterion(Config):
    """A criterion of a judge's rubric. A plain string is a criterion of weight 1."""

    text: str = Field(min_length=1)
    """Text that replaces `{criterion}` in `reward.judge.template`."""
    weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Weight of the criterion's grade in the score, which is the weighted mean of the grades."""

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        return {"text": value} if isinstance(value, str) else value


class JudgeSection(Config):
    """A language model that grades responses: one that the run deploys (`path`), or one on a server
    with OpenAI's protocol (`url`, `model`).

    A rubric of weighted criteria is the explicit aggregation of arXiv:2507.17746.
    """

    section = "reward.judge."

    path: str | None = None
    """Model that the run deploys in vLLM: a Hugging Face folder or a hub id. Where it runs:
    placement.mode.judge and placement.frozen.judge. null means that a server is asked."""
    max_model_len: int = Field(default=8192, ge=1)
    """path: maximum number of tokens of the judge's prompt and answer together. The model's number
    of positions also limits them. A longer prompt gets no grade."""
    url: Paths | None = None
    """Base address of a server with OpenAI's protocol, like `http://127.0.0.1:8000/v1`, or a list
    of servers that share the load. null means that the run deploys the judge."""
    model: str | None = None
    """url: name of the model at the server."""
    template: str
    """Prompt of the judge. `{prompt}`, `{response}`, `{label}`, `{criterion}` and names of columns
    in braces are replaced. Other braces are kept."""
    criteria: dict[str, Criterion] = Field(default_factory=dict)
    """Criteria by name. Each criterion is graded in a separate request, with its text in place of
    `{criterion}`. The score is the weighted mean of the grades, and each grade is a part of the
    score under its name. Empty means that the judge gives one grade."""
    grades: tuple[float, float] | dict[str, float] = (1.0, 10.0)
    """Grades that the judge may give. [lowest, highest]: numbers, which become scores from 0 to 1;
    a mapping like {CORRECT: 1, WRONG: 0}: words and their scores. The last number or word in the
    judge's answer counts. A number outside the range is no grade."""
    pattern: str | None = None
    """Regular expression that locates the grade in the judge's answer, like `Grade: (.*)`. The
    grade is read from the first group of the last match. null means that the grade may be anywhere
    in the answer."""
    chat: bool = True
    """Send the prompt as a chat message. false sends it as a text to complete, for base models; on
    a server, to its completions endpoint."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request (path: arguments of vLLM's SamplingParams), merged over
    {temperature: 0, max_tokens: 512}. null removes a field."""
    ungraded_score: float | None = Field(default=None, allow_inf_nan=False)
    """Score of a response if the judge's answer has no grade. With a temperature above 0, the
    request is first sent up to `reward.request.max_attempts` times. null means no score: the sample
    counts as failed (`reward.max_failed_fraction`), like a sample whose requests failed."""
    api_key_variable: str = "RAYPO_API_KEY"
    """Environment variable with the API key of the server, which is read on every node. If the
    variable is unset or empty, no key is sent."""

    @property
    def name(self) -> str:
        """Name of the model at its server, or the path of the model that the run deploys."""
        return str(self.path or self.model)

    @property
    def merged_sampling(self) -> dict[str, Any]:
        """Sampling parameters of a request: the defaults and `sampling`, without nulls."""
        merged = {"temperature": 0.0, "max_tokens": 512} | self.sampling
        return {name: value for name, value in merged.items() if value is not None}

    @property
    def columns(self) -> list[str]:
        """Names of the columns that the template refers to."""
        names = re.findall(r"\{(\w+)\}", self.template)
        return [each for each in dict.fromkeys(names) if each not in _JUDGE_FIELDS]

    def _problems(self) -> Iterator[str]:
        key = "reward.judge"
        if self.path is None:
            why, remedy = f"{key}.path is null", f"set {key}.path"
            yield from self._idle("max_model_len", why, remedy)
            if self.url is None or self.model is None:
                yield (
                    f"{key}.path (None): no judge is named. Set it to a model that the run deploys,"
                    f" or {key}.url and {key}.model to a server and its model."
                )
        else:
            why, remedy = f"{key}.path is deployed", f"remove {key}.path"
            yield from self._idle("url model api_key_variable", why, remedy)
        yield from _url_problems(f"{key}.url", self.url or (), "http://127.0.0.1:8000/v1")
        yield from self._problems_of_grades(key)

    def _problems_of_grades(self, key: str) -> Iterator[str]:
        if "{response}" not in self.template:
            yield (
                f"{key}.template: does not contain {{response}}. Write it where the response "
                "belongs."
            )
        if bool(self.criteria) != ("{criterion}" in self.template):
            yield (
                f"{key}.criteria ({', '.join(self.criteria) or 'none'}): the template must "
                "contain {criterion} if there are criteria, and only then. Add the missing part."
            )
        for name in ("score", "judge_s", "judge_ungraded"):  # names in every score of `Judge`
            if name in self.criteria:
                yield (
                    f"{key}.criteria ({name}): every score has a part of this name already. "
                    "Choose another name."
                )
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                problem = f"is not a regular expression: {error}"
                yield f"{key}.pattern ({self.pattern}): {problem}. Correct it."
        if isinstance(self.grades, dict):
            if not self.grades or not all(map(str.strip, self.grades)):
                example = "{CORRECT: 1, WRONG: 0}"
                yield (
                    f"{key}.grades ({self.grades}): must contain words, and none may be "
                    f"empty. Write it like {example}."
                )
        elif self.grades[0] >= self.grades[1]:
            yield f"{key}.grades ({list(self.grades)}): must increase. Write it like [1, 10]."


_JUDGE_FIELDS = ("prompt", "response", "label", "criterion")
"""Names in a judge's template that do not refer to columns."""


def _url_problems(key: str, urls: Iterable[str], example: str) -> Iterator[str]:
    for url in urls:
        if not re.fullmatch(r"https?://[^/\s]+\S*", url):
            yield (
                f"{key} ({url}): must begin with http:// or https:// and name a host. "
                f"Write it like {example}."
            )


class RewardSection(Config):
    """Scoring of the responses."""

    function: str | None = None
    """Reward function, `file.py:name` or `package.module:name`, with the signature (list[Rollout])
    -> list[float], or with that of TRL, f(prompts, completions, **columns). null means none."""
    processes: int = Field(default=0, ge=0)
    """Number of worker processes per learner worker for a slow reward function. Each call gets the
    rollouts of a few prompts. 0 means that the learner worker calls the function itself, with all
    of its rollouts at once."""
    timeout_s: float | None = Field(default=1800.0, gt=0.0)
    """Timeout of one call of the reward function, in seconds; null means no timeout. A call in a
    worker process is killed and its samples count as failed. A call in the learner worker cannot be
    killed, so the run stops."""
    url: Paths | None = None
    """Address of a reward server, to which `samples` are posted, or a list of servers that share
    the load. null means no server."""
    judge: JudgeSection | None = None
    """Language model that grades each response (docs/rewards.md). null means none."""
    request: RewardRequestSection = RewardRequestSection()
    weights: RewardWeights = RewardWeights()
    max_failed_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Fraction of a step's samples that may have no score (None, NaN) before the run stops."""

    @field_validator("function", mode="before")
    @classmethod
    def _is_one_function(cls, value: Any) -> Any:
        if isinstance(value, list | tuple | Mapping):
            raise ValueError(
                'must be one function. Write one that calls the others and returns {"score": their '
                "weighted sum, name: part, ...} per response (docs/rewards.md, Several at once)."
            )
        return value

    def _problems(self) -> Iterator[str]:
        if self.request != RewardRequestSection() and self.url is None and self.judge is None:
            yield (
                "reward.request: has no effect, because reward.url and reward.judge are null. "
                "Set one of them, or remove it."
            )
        yield from _url_problems("reward.url", self.url or (), "http://127.0.0.1:8000/score")


Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class WorkersSection(Config):
    """Learner workers and DeepSpeed, for every recipe."""

    section = "learner."

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
    lr_floor: float = Field(default=0.0, ge=0.0, le=1.0)
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
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Global norm to which gradients are clipped."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """ZeRO stage of DeepSpeed. 0 shards nothing, 1 the optimizer state, 2 also the gradients, 3
    also the weights. With one worker there is nothing to shard, so stages 1 and 2 run as 0. In
    bfloat16, stage 0 runs as 1, because DeepSpeed's own stage 0 would sum gradients in bfloat16.
    Otherwise the stage does not change the updates."""
    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Maximum number of tokens of one forward and backward pass; a prompt with several responses
    counts once. auto: 4096 on CPUs, and on GPUs the largest of 16384, 8192 and 4096 that fits
    (`raypo plan` shows which). With auto, a sequence above the limit gets a separate pass.
    Dedicated reference and reward models start before the learner's GPUs are known, so for them
    auto is 4096."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the model's layers, and recompute the other activations in the
    backward pass. This takes about a third more time and a fraction of the memory. The gradients
    are the same."""
    max_skipped_updates: int = Field(default=3, ge=0)
    """Number of consecutive non-finite updates that are skipped before the run stops."""
    deepspeed: dict[str, Any] = Field(default_factory=dict)
    """DeepSpeed options, merged over the generated DeepSpeed config.
    `zero_optimization.overlap_comm` needs stage 2 or 3, where it is on by default for several
    workers with GPUs. `zero_optimization.offload_optimizer` needs stage 1 to 3, and
    `zero_optimization.offload_param` stage 3; both accept only the device cpu."""

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
    def total_workers(self) -> int:
        """Number of all learner workers."""
        return self.num_workers

    def _problems(self) -> Iterator[str]:
        if self.min_workers is not None and self.min_workers > self.num_workers:
            yield (
                f"learner.min_workers ({self.min_workers}): must be at most learner.num_workers "
                f"({self.num_workers}). Set it lower."
            )
        if self.lr_schedule == "constant":
            why = "learner.lr_schedule is constant"
            yield from self._idle("lr_floor", why, "set learner.lr_schedule to linear or cosine")
        yield from self._deepspeed_problems()
        if self.optimizer == "muon":
            yield from self._muon_problems()

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
        why = "learner.optimizer is muon, whose updates do not depend on the norm"
        yield from self._idle("max_grad_norm", why, "set learner.optimizer to adamw")
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
        if self.max_tokens_per_microbatch != "auto" and longest > self.microbatch_tokens:
            yield (
                f"learner.max_tokens_per_microbatch ({self.max_tokens_per_microbatch}): one "
                f"sequence may have {longest} tokens ({keys}). Set "
                f"learner.max_tokens_per_microbatch to at least {longest}, or lower the limits "
                "in parentheses."
            )


class LearnerSection(WorkersSection):
    """Learner workers that train policy and critic with DeepSpeed."""

    critic_workers: int = Field(default=0, ge=0)
    """Number of additional Ray Train workers that hold only the critic. The `num_workers` then hold
    only the policy, and policy and critic are updated at the same time. 0 means that the
    `num_workers` hold both models. The results of a step are the same in either case."""
    policy_lr: float = Field(default=1e-6, ge=0.0)
    """Highest learning rate of the policy."""
    critic_lr: float = Field(default=1e-5, ge=0.0)
    """Highest learning rate of the critic."""
    save_critic: bool = False
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


class Periodic(Config):
    """A section of a task that is due every `every` steps and after the last step."""

    if TYPE_CHECKING:  # each subclass has this field, with its own default
        every: int

    def is_due(self, step: int, *, last_step: int) -> bool:
        """Return whether the task is due after `step` (counted from 1)."""
        return step % self.every == 0 or step == last_step


class EvalSection(Periodic):
    """Evaluation on held-out prompts during the run."""

    prompts: HeldOutSources | None = None
    """Held-out sources, as in data.prompts, with the same columns. null means no evaluation."""
    function: str | None = None
    """Reward function for the responses to held-out prompts. `eval/score_mean` is the mean of its
    scores. null means reward.function. If that is null too, responses are scored as in training."""
    timeout_s: float | None = Field(default=1800.0, gt=0.0)
    """Timeout of one call of an evaluation function, in seconds, after which the run stops. null
    means no timeout."""
    every: int = Field(default=10, ge=1)
    """Steps between evaluations. There is always one before the first update and one after the
    last."""
    samples_per_prompt: int = Field(default=1, ge=1)
    """Responses sampled for each held-out prompt."""
    temperature: float | None = Field(default=None, ge=0.0)
    """Sampling temperature for held-out prompts; 0 is greedy. null means rollout.temperature."""
    pass_at: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Values of k for pass@k (arXiv:2107.03374), each at most samples_per_prompt. A response passes
    if its score is 1 or more."""

    def _problems(self) -> Iterator[str]:
        if self.pass_at and max(self.pass_at) > self.samples_per_prompt:
            yield (
                f"eval.pass_at ({list(self.pass_at)}): pass@k needs k samples of a prompt, and "
                f"eval.samples_per_prompt is {self.samples_per_prompt}. Set "
                f"eval.samples_per_prompt to at least {max(self.pass_at)}."
            )


class CheckpointSection(Periodic):
    """Checkpoints of the whole training state."""

    section = "checkpoint."

    every: int = Field(default=10, ge=1)
    """Steps between checkpoints. The last step always has one."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep. With `best_by` it is the number of best checkpoints,
    and the newest checkpoint is kept in addition."""
    best_by: str | None = None
    """Metric that selects the best checkpoint, like eval/score_mean. A checkpoint is saved at each
    step that improves on all earlier steps, and `best/` holds the models of the best one. null
    means that only the newest checkpoints are kept."""
    best_mode: Literal["max", "min"] = "max"
    """Direction of the metric. max: larger is better; min: smaller is better."""
    changed_inputs: Literal["refuse", "accept"] = "refuse"
    """Behaviour of a resumed run if a data file, a Python file or a model of its config has changed
    since the run began. refuse: stop; accept: continue, and record in `summary.json` what has
    changed and after which step."""

    def _problems(self) -> Iterator[str]:
        if self.best_by is None:
            why, remedy = "checkpoint.best_by is null", "set checkpoint.best_by to a metric"
            yield from self._idle("best_mode", why, remedy)


class StopSection(Config):
    """Early stopping. Each rule that is set can end the run, with a checkpoint."""

    section = "stop."

    metric: str = "eval/score_mean"
    """Metric that `at` and `patience` check each time it is measured."""
    mode: Literal["max", "min"] = "max"
    """Direction of the metric. max: larger is better; min: smaller is better."""
    at: float | None = None
    """Threshold of the metric. The run ends when the metric is at least this value (with mode min:
    at most this value). null means no such rule."""
    patience: int | None = Field(default=None, ge=1)
    """Number of consecutive measurements without improvement on the best measurement, after which
    the run ends. null means no such rule."""
    min_change: float = Field(default=0.0, ge=0.0)
    """Minimum improvement for `patience`: a measurement must beat the best one by more than this
    value."""
    after_s: float | None = Field(default=None, gt=0.0)
    """Time limit in seconds, counted from the start of the command. The command ends after the step
    in progress, as with Ctrl-C, and the same command resumes the run. The limit is meant for
    machines that are available only for some time. null means no limit."""

    @property
    def watches(self) -> bool:
        """True if a metric can end the run."""
        return self.at is not None or self.patience is not None

    def _problems(self) -> Iterator[str]:
        if self.patience is None:
            yield from self._idle("min_change", "stop.patience is null", "set stop.patience")
        if not self.watches:
            why = "neither stop.at nor stop.patience is set"
            yield from self._idle("metric mode", why, "set one of them")


class ClusterSection(Config):
    """The Ray cluster."""

    address: str | None = None
    """Address of the Ray cluster, host:port. auto: the Ray cluster that runs on this machine. null
    means RAY_ADDRESS. If RAY_ADDRESS is not set, a local Ray with the dashboard is started. It ends
    with the command."""
    namespace: str = "raypo"
    """Ray namespace of the actors. If you have called `ray.init` yourself, the namespace of that
    call is used instead."""


class WandbSection(Config):
    """Weights & Biases. It needs the package wandb."""

    project: str = "raypo"
    """Project name in Weights & Biases."""
    entity: str | None = None
    """User or team. null means the account's default."""
    mode: Literal["online", "offline"] = "online"
    """Upload mode. online: send metrics as they come; offline: write them into the run folder, to
    be sent later by `wandb sync`."""


class MLflowSection(Config):
    """MLflow. It needs the package mlflow."""

    experiment: str = "raypo"
    """Experiment name in MLflow."""
    tracking_uri: str | None = None
    """Server (http://...) or database (sqlite:///mlflow.db). null means MLFLOW_TRACKING_URI."""


class LoggingSection(Config):
    """Destinations of the metrics besides metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard event files into the run folder."""
    prometheus: bool = True
    """Export gauges with the labels run and trial on Ray's metrics endpoint (see `raypo monitor`).
    """
    wandb: WandbSection | None = None
    """Send the metrics to Weights & Biases. {} means its defaults, null means off."""
    mlflow: MLflowSection | None = None
    """Send the metrics to MLflow. {} means its defaults, null means off."""
