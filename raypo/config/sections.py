"""Config sections that several recipes share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from raypo.config.base import Config
from raypo.config.fields import FUNCTION, PATH
from raypo.config.only_if import SET, only_if, unless
from raypo.config.sources import HeldOutSources, TrainedSources, one_or_many

Paths = Annotated[tuple[str, ...], BeforeValidator(one_or_many)]


class RewardModelEntry(Config):
    """A reward model and its weight."""

    path: Annotated[str, PATH]
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


class TrainedModelSection(Config):
    """The trained model."""

    policy: Annotated[str, PATH]
    """Model to train: a Hugging Face folder or a hub id."""
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
    lora: LoraSection | None = None
    """Train a LoRA adapter (and a reward model's score head). {} means the default adapter, null
    means that all weights are trained."""
    freeze: tuple[Literal["vision"], ...] = ("vision",)
    """Parts of a model that are not trained. vision: all that images pass through before the
    language model, which is the vision tower and its merger, projector or connector. [] trains
    them, too. Models of text alone have no such part."""


class SampledModelSection(TrainedModelSection):
    """The models of a run that samples. Every path is a Hugging Face folder or a hub id."""

    head_dtype: Literal["model", "float32"] = "model"
    """Data type in which learner, engines and reference or teacher compute the logits from the last
    hidden states. model: `dtype`; float32: the products of `dtype` are summed and kept in float32,
    which brings the log-probs of engine and learner closer together in bfloat16 (MiniMax-M1,
    arXiv:2506.13585, section 3.2). Weights keep `dtype`. float32 needs vLLM 0.26 or later."""
    reward: RewardModels = None
    """Reward model, or a list of them; each is a path or {path, weight}."""
    lora: PolicyLoraSection | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Train LoRA adapters; {} means the default adapters, null means that all weights are trained.
    """

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.head_dtype == "float32" and self.lora and "lm_head" in self.lora.target_modules:
            yield (
                "model.lora.target_modules (lm_head): a head in float32 takes no adapter. Set "
                "model.head_dtype to model, or remove lm_head."
            )


class ReferenceModelSection(SampledModelSection):
    """The models of a run with a reference. Every path is a Hugging Face folder or a hub id."""

    reference: Annotated[
        str | None, PATH, unless("dpo.loss", "simpo"), only_if("iterative_dpo.reference", "start")
    ] = None
    """Reference model of the KL penalty or of the DPO loss. It needs the policy's tokenizer. null
    means the initial policy. With model.lora that is the policy with its adapter off, and no second
    model is loaded."""

    @property
    def is_own_reference(self) -> bool:
        """True if the reference is the learner's policy with its adapter off."""
        return self.lora is not None and self.reference is None


class ModelSection(ReferenceModelSection):
    """The models of a run. Every path is a Hugging Face folder or a hub id."""

    critic: Annotated[str | None, PATH] = None
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
    image_key: str | None = None
    """Column of the images of a prompt, for a policy that reads images: one image or a list. An
    image is a path (a relative one begins at the folder of the data), a URI, the bytes of a file or
    an image of `datasets`. Its place is a part of type image in the chat messages, or `<image>` in
    their text; without both, images stand before the first text of the user. Parts may also hold
    their images; if all do, name the column of the messages. null means that prompts are text.
    docs/images.md has the models."""
    max_images: int = Field(default=8, ge=1)
    """Maximum number of images of a prompt. Rows with more are refused. Engines reserve memory for
    as many."""
    label_key: str | None = None
    """Column that reward functions get as `rollout.label`. null means no label. All columns are in
    `rollout.row`."""
    system_prompt: str | None = Field(default=None, min_length=1)
    """System message that is put before the chat messages of each row. Rows that already have a
    system message, and prompts that are plain text (see `as_chat`), are refused. null means the
    text in the row's column `system`, if there is one."""
    as_chat: bool = False
    """Make a prompt that is plain text the user message of a chat, to which the chat template is
    applied. Models that are tuned for chats need it. Chat messages are unchanged."""
    tools_key: Annotated[
        str | None, only_if("rollout.environment", None), only_if("rollout.agent", None)
    ] = None
    """Column of the tools that the chat template describes: a list of JSON schemas, or that list as
    JSON text. null means the column `tools`, if it holds JSON schemas. Environments and agents
    define their own tools."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables that the chat template reads, like {enable_thinking: false}. They apply wherever
    the policy's chat template is rendered: rows, episodes, requests of agents, evaluation and
    `raypo serve`. A row's column `chat_template_kwargs` adds to them. A variable that the template
    does not read is refused."""
    special_tokens_in_text: Literal["auto", "text", "tokens", "refuse"] = "auto"
    """Treatment of special tokens (`<|im_end|>`) that stand in the texts of rows, observations and
    requests instead of being written by the chat template. text: they are tokenised as ordinary
    text, so they can neither end a turn nor begin one; tokens: they become the special tokens,
    which prompts need that a chat template has rendered before; refuse: the row is invalid
    (`on_error`), the episode fails. auto: text in chat messages, refuse in texts to which no chat
    template applies."""
    max_prompt_tokens: int = Field(default=256, ge=1)
    """Maximum prompt length in tokens."""
    too_long: Literal["skip", "error"] = "skip"
    """Treatment of longer prompts. skip: leave them out and count them; error: stop with an error.
    """
    on_error: Literal["refuse", "drop"] = "refuse"
    """Treatment of an invalid row (a broken line, a missing column, an invalid message, a response
    with an end token in the middle). refuse: do not start; drop: leave the row out. The console
    reports how many rows were dropped, with file and line of the first."""

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_no_arguments_of_raypo(cls, value: dict[str, Any]) -> dict[str, Any]:
        fixed = {"messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"}
        if wrong := fixed & {*value}:
            raise ValueError(f"raypo itself sets {', '.join(sorted(wrong))}. Remove it.")
        return value

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


class Periodic(Config):
    """A section of a task that is due every `every` steps and after the last step."""

    if TYPE_CHECKING:  # each subclass has this field, with its own default
        every: int

    def is_due(self, step: int, *, last_step: int) -> bool:
        """Return whether the task is due after `step` (counted from 1)."""
        return step % self.every == 0 or step == last_step


class HeldOutSection(Periodic):
    """Evaluation on held-out pairs."""

    prompts: HeldOutSources | None = None
    """Held-out sources, as in data.prompts, with the same columns. null means no evaluation."""
    every: Annotated[int, Field(ge=1)] = 50
    """Steps between evaluations. There is always one before the first update and one after the
    last."""


class EvalSection(HeldOutSection):
    """Evaluation on held-out prompts during the run."""

    every: int = Field(default=10, ge=1)
    function: Annotated[str | None, FUNCTION] = None
    """Reward function for the responses to held-out prompts. `eval/score_mean` is the mean of its
    scores. null means reward.function. If that is null too, responses are scored as in training. An
    agent's episodes always have the agent's own scores."""
    timeout_s: float | None = Field(default=1800.0, gt=0.0)
    """Timeout of one call of an evaluation function, in seconds, after which the run stops. null
    means no timeout."""
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

    every: int = Field(default=10, ge=1)
    """Steps between checkpoints. The last step always has one."""
    keep: int = Field(default=2, ge=1)
    """Number of newest checkpoints to keep. With `best_by` it is the number of best checkpoints,
    and the newest checkpoint is kept in addition."""
    best_by: str | None = None
    """Metric that selects the best checkpoint, like eval/score_mean. A checkpoint is saved at each
    step that improves on all earlier steps, and `best/` holds the models of the best one. null
    means that only the newest checkpoints are kept."""
    best_mode: Annotated[Literal["max", "min"], only_if("best_by", SET)] = "max"
    """Direction of the metric. max: larger is better; min: smaller is better."""
    background: Literal["auto"] | bool = "auto"
    """Write checkpoints and models from a copy in RAM (12 bytes a trained weight, and the models
    once) while the next steps run, so that a step waits only for the copy. false: write them within
    their step. auto: true if the nodes have twice that RAM free at the first checkpoint. Trials of
    a sweep, and runs that save a critic which has workers of its own, write within the step."""
    changed_inputs: Literal["refuse", "accept"] = "refuse"
    """Behaviour of a resumed run if a data file, a Python file or a model of its config has changed
    since the run began. refuse: stop; accept: continue, and record in `summary.json` what has
    changed and after which step."""


class StopSection(Config):
    """Early stopping. Each rule that is set can end the run, with a checkpoint."""

    metric: Annotated[str, only_if("at", SET) | only_if("patience", SET)] = "eval/score_mean"
    """Metric that `at` and `patience` check each time it is measured."""
    mode: Annotated[Literal["max", "min"], only_if("at", SET) | only_if("patience", SET)] = "max"
    """Direction of the metric. max: larger is better; min: smaller is better."""
    at: float | None = None
    """Threshold of the metric. The run ends when the metric is at least this value (with mode min:
    at most this value). null means no such rule."""
    patience: int | None = Field(default=None, ge=1)
    """Number of consecutive measurements without improvement on the best measurement, after which
    the run ends. null means no such rule."""
    min_change: Annotated[float, only_if("patience", SET)] = Field(default=0.0, ge=0.0)
    """Minimum improvement: a measurement must beat the best one by more than this
    value."""
    after_s: float | None = Field(default=None, gt=0.0)
    """Time limit in seconds, counted from the start of the command. The command ends after the step
    in progress, as with Ctrl-C, and the same command resumes the run. The limit is meant for
    machines that are available only for some time. null means no limit."""

    @property
    def watches(self) -> bool:
        """True if a metric can end the run."""
        return self.at is not None or self.patience is not None


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
