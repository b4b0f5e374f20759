"""Data types shared by several packages: prompts, rollouts, training examples, batches.

Dimensions: B responses, P prompt tokens, T response tokens. In every mask, True means keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Images:
    """Images of one prompt. All samples of the prompt's group hold the same object."""

    files: tuple[bytes, ...]
    """Encoded images (PNG, JPEG, ...), in the order of their placeholders, for the engine."""
    inputs: Mapping[str, np.ndarray]
    """Outputs of the model's processor, under the names of the model's forward method, such
    as `pixel_values` and `image_grid_thw`, for the learner. It is made at the first access, and
    not copied between processes."""
    placeholder_id: int
    """Token that stands in the prompt's ids for each vector of the vision tower."""
    digest: str
    """SHA-256 of the files, in hex digits."""
    slotted_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """Ids of the prompt with one token for each image, as its text has them, int32. The engine puts
    the placeholders in."""
    num_prompt_tokens: int = 0
    """Number of the prompt's token ids, with the placeholders."""


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt data, tokenised once.

    Each time that it is drawn, a copy with another `group_index` is made.
    """

    index: int
    """Row number over all files of `data.prompts`, in their order."""
    text: str
    token_ids: np.ndarray  # int32 [P]
    label: Any = None
    messages: list[dict[str, Any]] | None = None
    """Chat messages of the prompt, or None if the prompt is a plain string."""
    data_source: str | None = None
    """Name of the prompt's source in `data.prompts`."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the row."""
    images: Images | None = None
    group_index: int = -1
    """Index of the draw in the run, from 0. The samples of one draw are a group. -1 means that the
    prompt has not been drawn."""


@dataclass(frozen=True)
class ToolUse:
    """One tool call in an episode."""

    name: str
    """Tool name as the policy wrote it; empty if the call could not be parsed."""
    seconds: float
    error: str | None = None
    turn: int = 0
    """Number of policy turns so far, including the one with the call."""


@dataclass(frozen=True)
class Episode:
    """Outcome of an episode: several turns with an environment, or an agent's run."""

    score: float
    """Sum of the environment's rewards, or the agent's return value; NaN if the episode failed."""
    num_turns: int
    """Number of policy turns."""
    environment_s: float
    """Seconds that the policy waited for the environment, or for the agent's next call."""
    error: str | None = None
    """Reason of the failure, or None if the episode did not fail."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that the environment or the agent reported."""
    tool_uses: tuple[ToolUse, ...] = ()


RolloutKey = tuple[int, int, int]
"""Group, sample and row index of a rollout: unique in a run, and the same on all workers."""


@dataclass(frozen=True)
class Rollout:
    """One prompt with one response. Ragged, without padding.

    A reward function gets rollouts without score. Callbacks and filters get them with their scores.
    """

    prompt: str
    response: str
    """Text of the response, for people and verifiers. Training uses the ids."""
    prompt_ids: np.ndarray  # int32 [P]
    response_ids: np.ndarray  # int32 [T], with the end of sequence if it was sampled
    log_probs: np.ndarray  # float32 [T], from the engine, at the sampling temperature
    response_mask: np.ndarray  # bool [T], False on environment tokens
    label: Any
    prompt_index: int
    """Row of the prompt in the data."""
    sample_index: int
    """Index of the sample in its group, from 0."""
    finish_reason: str
    """`stop` or `length`."""
    weight_version: int
    """Version of the weights that sampled the first token."""
    group_index: int = 0
    """Index of the rollout's group in the run, from 0. Each time that a prompt is drawn from the
    data, its samples form a new group."""
    messages: list[dict[str, Any]] | None = None
    """Chat messages of the prompt, or None if the prompt is a plain string."""
    data_source: str | None = None
    """Name of the prompt's source in `data.prompts`."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the prompt's row in the data."""
    episode: Episode | None = None
    """Episode that the response is part of, or None for a single-turn response."""
    row_index: int = 0
    """Index of the conversation in its episode. All conversations of an episode share its score and
    count as one sample."""
    turn_rewards: np.ndarray | None = None
    """float32 [T]: reward of each turn from the environment, at the turn's last token; 0 elsewhere.
    """
    turn_index: np.ndarray | None = None
    """int32 [T]: index of the turn that sampled each token, within the row; -1 elsewhere. It
    is None for a single-turn response."""
    later_versions: tuple[tuple[int, int], ...] = ()
    """Weight updates during the response. Each entry has the index of the first token that the new
    weights sampled, and the version of these weights."""
    score: float = math.nan
    """Score that PPO trains on, before KL and shaping; NaN before scoring, and if it failed."""
    scores_by_source: Mapping[str, float] = field(default_factory=dict)
    ref_log_probs: np.ndarray | None = None  # float32 [T]; None without a reference
    prompt_experts: np.ndarray | None = None
    """uint8, or int16 for more than 256 experts, [P, L, k]: experts that the engine chose for each
    prompt token, in each of L layers. None without `rollout.router_replay`."""
    response_experts: np.ndarray | None = None
    """The same of the response tokens, [T, L, k]; 0 for the last one, which no model reads."""
    images: Images | None = None
    """Images of the prompt."""
    minibatch: int = 0
    """Index of the step's minibatch that trains the rollout. It is set when the step's rollouts are
    sharded."""

    @property
    def key(self) -> RolloutKey:
        """Key that identifies the rollout within its run."""
        return self.group_index, self.sample_index, self.row_index

    @property
    def weight_versions(self) -> np.ndarray:
        """Version of the weights that sampled each token; int64 [T].

        Example: 5 tokens with `weight_version` 3 and `later_versions` ((2, 4),) give 3 3 4 4 4.
        """
        versions = np.full(len(self.response_ids), self.weight_version, dtype=np.int64)
        for first, version in self.later_versions:
            versions[first:] = version
        return versions

    @property
    def num_tokens(self) -> int:
        """Number of prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_sampled(self) -> int:
        """Number of response tokens that the policy sampled, without environment tokens."""
        return int(self.response_mask.sum())


@dataclass(frozen=True)
class Example:
    """A prompt with the response to learn, for the recipe `sft`."""

    prompt_ids: np.ndarray  # int32 [P]
    response_ids: np.ndarray  # int32 [T], the end of sequence included
    mask: np.ndarray | None = None  # bool [T]; None means True everywhere
    """True on the tokens to learn, if the response has several turns of a conversation."""
    images: Images | None = None
    """Images of the prompt."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_learned(self) -> int:
        """Number of response tokens that are learned."""
        return len(self.response_ids) if self.mask is None else int(self.mask.sum())


@dataclass(frozen=True)
class Pair:
    """A prompt with a better and a worse response, for the recipes `reward_model` and `dpo`."""

    prompt_ids: np.ndarray  # int32 [P]
    chosen_ids: np.ndarray  # int32 [T], the end of sequence included
    rejected_ids: np.ndarray  # int32 [T], the end of sequence included
    margin: float = 0.0
    """Margin by which the chosen response is better, in units of the score."""
    ref_log_probs: tuple[float, float] | None = None
    """Log-probs of the chosen and the rejected response under the reference, summed over tokens."""
    images: Images | None = None
    """Images of the prompt."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in a forward pass: the prompt once, and both responses."""
        return len(self.prompt_ids) + len(self.chosen_ids) + len(self.rejected_ids)


@dataclass(frozen=True)
class Verdict:
    """A prompt with a desirable or undesirable response, for the recipe `dpo` with loss `kto`."""

    prompt_ids: np.ndarray  # int32 [P]
    response_ids: np.ndarray  # int32 [T], the end of sequence included
    is_desirable: bool
    other_ids: np.ndarray  # int32 [T'], a response to another prompt, to estimate the KL
    ref_log_probs: tuple[float, float] | None = None
    """Log-probs of `response_ids` and `other_ids` under the reference, summed over tokens."""
    images: Images | None = None
    """Images of the prompt."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in a forward pass: the prompt once, and both responses."""
        return len(self.prompt_ids) + len(self.response_ids) + len(self.other_ids)


@dataclass(frozen=True)
class Taught:
    """A prompt with a response and the teacher's log-probs, for the recipe `distillation`."""

    prompt_ids: np.ndarray  # int32 [P]
    response_ids: np.ndarray  # int32 [T], the end of sequence included
    teacher_log_probs: np.ndarray  # float32 [T, K]
    teacher_ids: np.ndarray  # int32 [T, K], tokens that the log-probs belong to
    teacher_prompt_ids: np.ndarray | None = None  # int32 [P'], None: the teacher reads prompt_ids

    @property
    def num_tokens(self) -> int:
        """Number of prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


def to_device(tensor: Tensor, device: Any) -> Tensor:
    """Copy a tensor to a device. A copy to a GPU is asynchronous.

    The copy goes through pinned memory. A copy from pageable memory would wait for the work queued
    on the GPU, and the GPU would then idle while the next microbatch is packed.
    """
    if str(device).startswith("cuda") and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


_BY_PROMPT_TOKEN = ("prompt_ids", "prompt_mask", "prompt_experts")
_READ_BY_PACKING = (*_BY_PROMPT_TOKEN, "response_ids", "attention_mask", "response_experts")
_BY_RESPONSE = (
    *("scores", "group_index", "sample_index", "row_index", "minibatch", "truncated"),
    *("weight_version", "last_values", "sample_tokens"),
)
"""Fields of an Experience with one value per response, [B], instead of [B, T]."""


@dataclass(frozen=True)
class Experience:
    """A padded batch with everything that an update needs. Prompts are left-padded, responses
    right.

    Example: prompts of 2 and 3 tokens, responses of 2 and 1 give P = 3, T = 2 and `prompt_mask[0] =
    [F, T, T]`, `response_mask[1] = [T, F]`.
    """

    prompt_ids: Tensor  # [B, P] int64
    prompt_mask: Tensor  # [B, P] bool, False on padding
    response_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] bool, False on padding, True on environment tokens
    response_mask: Tensor  # [B, T] bool, True on tokens that the policy sampled
    rollout_log_probs: Tensor  # [B, T] float32, from the engine
    scores: Tensor  # [B] float32, before KL and shaping; NaN if scoring failed
    group_index: Tensor  # [B] int64, index of the sample's group in the run
    minibatch: Tensor  # [B] int64, index of the step's minibatch that trains the row
    truncated: Tensor  # [B] bool, the response reached rollout.max_new_tokens
    weight_version: Tensor  # [B] int64, weights that sampled the response's first token
    parts: Tensor | None = None  # [B, K] float32, named parts of the score; NaN: not given
    turn_rewards: Tensor | None = None  # [B, T] float32, rewards of single turns
    turn_index: Tensor | None = None  # [B, T] int64, turn of the row that sampled the token
    weight_versions: Tensor | None = None  # [B, T] int64; None: as weight_version
    prompt_experts: Tensor | None = None  # [B, P, L, k] uint8 or int16; None: not replayed
    response_experts: Tensor | None = None  # [B, T, L, k] uint8 or int16; None: not replayed
    sample_index: Tensor | None = None  # [B] int64, index within the group
    row_index: Tensor | None = None  # [B] int64, index within the sample; None: all 0
    ref_log_probs: Tensor | None = None  # [B, T] float32
    old_log_probs: Tensor | None = None  # [B, T] float32, learner, before the update
    entropy: Tensor | None = None  # [B, T] float32, learner, before the update; None: not used
    weights: Tensor | None = None  # [B, T] float32, of rollout correction; None: 1
    loss_mask: Tensor | None = None  # [B, T] bool, tokens that count; None: response_mask
    sample_tokens: Tensor | None = None  # [B] int64, tokens of the whole sample; None: of the row
    covariant: Tensor | None = None  # [B, T] bool, tokens of high covariance; None: not used
    high_entropy: Tensor | None = None  # [B, T] bool, tokens that keep a gradient; None: all
    values: Tensor | None = None  # [B, T] float32, critic, before the update
    last_values: Tensor | None = None  # [B] float32, critic, after a truncated response
    advantages: Tensor | None = None  # [B, T] float32
    returns: Tensor | None = None  # [B, T] float32
    images: tuple[Images | None, ...] | None = None  # [B], the prompt's; None: no row has any

    def __post_init__(self) -> None:
        rows, prompt = self.prompt_ids.shape
        response = self.response_ids.shape[1]
        expected: dict[str, tuple[int, ...]] = dict.fromkeys(_BY_PROMPT_TOKEN, (rows, prompt))
        expected |= dict.fromkeys(_BY_RESPONSE, (rows,))
        if self.parts is not None:
            expected["parts"] = (rows, self.parts.shape[-1])
        for name, value in self._tensors().items():
            shape = expected.get(name, (rows, response))
            # Experts have two more axes.
            assert tuple(value.shape[:2]) == shape, (
                f"Experience.{name} has shape {tuple(value.shape)}, expected {shape}"
            )
        assert self.images is None or len(self.images) == rows

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    def staleness(self, version: int) -> Tensor:
        """Return how many versions each token's weights are behind `version`; int64 [B, T]."""
        by_response = self.weight_version.unsqueeze(1).expand(self.response_mask.shape)
        return version - (by_response if self.weight_versions is None else self.weight_versions)

    @property
    def is_first_row(self) -> Tensor:
        """Mask with True on one row per sample, to count samples; bool [B]."""
        if self.row_index is None:
            return self.scores.new_ones(len(self)).bool()
        return self.row_index == 0

    @property
    def experts(self) -> tuple[Tensor, Tensor] | None:
        """Experts to replay, of the prompts and of the responses, or None."""
        if self.prompt_experts is None or self.response_experts is None:
            return None
        return self.prompt_experts, self.response_experts

    @property
    def counted(self) -> Tensor:
        """Mask with True on tokens that the losses count; bool [B, T]."""
        return self.response_mask if self.loss_mask is None else self.loss_mask

    def with_(self, **changes: Any) -> Experience:
        """Return the same batch with some fields replaced."""
        return replace(self, **changes)

    def to(self, device: Any) -> Experience:
        """Return the same batch on a device. Fields that packing reads stay on the CPU."""
        # Packing runs on the CPU and sends its result to the device.
        return self._changed(
            lambda name, v: v if name in _READ_BY_PACKING else to_device(v, device)
        )

    def blank(self) -> Experience:
        """Return a batch of one row with the same fields.

        The row has one prompt token and one response token, which is masked out of every loss.
        """

        def row(name: str, value: Tensor) -> Tensor:
            if name in ("prompt_mask", "attention_mask"):
                return value.new_ones((1, 1))
            return value.new_zeros((*(1 for _ in value.shape[:2]), *value.shape[2:]))

        return replace(self, images=None)._changed(row)

    def select(self, rows: Tensor) -> Experience:
        """Return the given rows, trimmed to their longest prompt and longest response.

        Args:
            rows: Indices of the rows; int64 [b].
        """
        prompts = int(self.prompt_mask[rows].sum(1).max()) if len(rows) else 0
        responses = int(self.attention_mask[rows].sum(1).max()) if len(rows) else 0
        first = self.prompt_ids.shape[1] - prompts

        def picked(name: str, value: Tensor) -> Tensor:
            if name in _BY_PROMPT_TOKEN:
                return value[rows, first:]
            by_token = value.dim() > 1 and name != "parts"
            return value[rows, :responses] if by_token else value[rows]

        images = self.images and tuple(self.images[row] for row in rows.tolist())
        return replace(self, images=None)._changed(picked).with_(images=images)

    def _tensors(self) -> dict[str, Tensor]:
        """Return the fields that hold a tensor, by name."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return {k: v for k, v in held.items() if v is not None and k != "images"}

    def _changed(self, change: Callable[[str, Tensor], Tensor]) -> Experience:
        """Return the batch with `change(name, value)` applied to each tensor."""
        return replace(self, **{k: change(k, v) for k, v in self._tensors().items()})
