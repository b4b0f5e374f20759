"""The nouns that cross rooms: Prompt, Rollout, ScoredRollout, Example, Pair, Verdict, Experience.

B responses, P prompt tokens, T response tokens. Every mask: True = keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One row of the prompt data, tokenised once."""

    index: int
    """Row in the data, files in the order of `data.prompts`."""
    text: str
    token_ids: np.ndarray  # int32 [P]
    label: Any = None
    messages: list[dict[str, Any]] | None = None
    """The chat messages, where the prompt was given so."""
    data_source: str | None = None
    """Name of its source in `data.prompts`."""


@dataclass(frozen=True)
class ToolUse:
    """One call of a tool in an episode."""

    name: str
    """As the policy wrote it; empty where it wrote no call that can be read."""
    seconds: float
    error: str | None = None
    turn: int = 0
    """After so many turns of the policy."""


@dataclass(frozen=True)
class Episode:
    """What became of an episode: of several turns with an environment, or of an agent's run."""

    score: float
    """The sum of the environment's rewards, or what the agent returned; NaN where it failed."""
    num_turns: int
    """Turns of the policy."""
    environment_s: float
    """Seconds that the policy waited for the environment, or for the agent between its calls."""
    error: str | None = None
    """Why it failed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the environment or the agent measured."""
    tool_uses: tuple[ToolUse, ...] = ()


@dataclass(frozen=True)
class Rollout:
    """One prompt and one response; what reward functions see. Ragged, no padding."""

    prompt: str
    response: str
    """For people and verifiers; training uses the ids."""
    prompt_ids: np.ndarray  # int32 [P]
    response_ids: np.ndarray  # int32 [T], the end of sequence included when it was sampled
    log_probs: np.ndarray  # float32 [T], as the engine reported them, at the sampling temperature
    response_mask: np.ndarray  # bool [T], False where an environment wrote
    label: Any
    prompt_index: int
    """Row of the prompt in the data."""
    sample_index: int
    """Which of the prompt's samples, from 0."""
    finish_reason: str
    """stop | length."""
    weight_version: int
    """Version of the weights that sampled its first token."""
    group_index: int = 0
    """Which draw of the run the prompt was, from 0: the samples of one draw are a group."""
    messages: list[dict[str, Any]] | None = None
    """The prompt's chat messages, where it was given so."""
    data_source: str | None = None
    """Name of the prompt's source in `data.prompts`."""
    episode: Episode | None = None
    """Where the response is of several turns: what the policy and an environment wrote."""
    row_index: int = 0
    """Which conversation of its episode; all of them share the score, and are one sample."""
    turn_rewards: np.ndarray | None = None
    """float32 [T]: what an environment gave for a turn, at its last token; elsewhere 0."""
    turn_index: np.ndarray | None = None
    """int32 [T]: of an episode, which of the row's turns sampled a token; elsewhere -1."""
    later_versions: tuple[tuple[int, int], ...] = ()
    """Where new weights came meanwhile: the first token that they sampled, and their version."""

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
        """Prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_sampled(self) -> int:
        """Response tokens that the policy sampled; what an environment wrote does not count."""
        return int(self.response_mask.sum())


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with all that frozen parts say of it; what callbacks see."""

    rollout: Rollout
    score: float
    """What PPO trains on, before KL and shaping; NaN when scoring failed."""
    scores_by_source: Mapping[str, float]
    ref_log_probs: np.ndarray | None = None  # float32 [T]; None without a reference
    minibatch: int = 0
    """Which minibatch of the step trains it; known once the step's rollouts are dealt."""


@dataclass(frozen=True)
class Example:
    """A prompt with the response to learn; recipe `sft`."""

    prompt_ids: np.ndarray  # int32 [P]
    response_ids: np.ndarray  # int32 [T], the end of sequence included
    mask: np.ndarray | None = None  # bool [T], False on what others wrote; None: True
    """Of a conversation with several turns, which tokens are learned."""

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_learned(self) -> int:
        """Response tokens that are learned."""
        return len(self.response_ids) if self.mask is None else int(self.mask.sum())


@dataclass(frozen=True)
class Pair:
    """A prompt with a better and a worse response; recipes `reward_model` and `dpo`."""

    prompt_ids: np.ndarray  # int32 [P]
    chosen_ids: np.ndarray  # int32 [T], the end of sequence included
    rejected_ids: np.ndarray  # int32 [T], the end of sequence included
    margin: float = 0.0
    """How much better the chosen one is, in units of the score."""
    ref_log_probs: tuple[float, float] | None = None
    """What the reference says of the chosen and the rejected response: sums over their tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens that a pass reads: the prompt once, and both responses."""
        return len(self.prompt_ids) + len(self.chosen_ids) + len(self.rejected_ids)


@dataclass(frozen=True)
class Verdict:
    """A prompt with a response that is desirable or not; recipe `dpo` with the loss `kto`."""

    prompt_ids: np.ndarray  # int32 [P]
    response_ids: np.ndarray  # int32 [T], the end of sequence included
    is_desirable: bool
    other_ids: np.ndarray  # int32 [T'], a response to another prompt: it estimates the KL
    ref_log_probs: tuple[float, float] | None = None
    """What the reference says of the response and of the other one: sums over their tokens."""

    @property
    def num_tokens(self) -> int:
        """Tokens that a pass reads: the prompt once, and both responses."""
        return len(self.prompt_ids) + len(self.response_ids) + len(self.other_ids)


@dataclass(frozen=True)
class Taught:
    """A prompt with a response, and what a teacher would have written; recipe `distillation`."""

    prompt_ids: np.ndarray  # int32 [P]
    response_ids: np.ndarray  # int32 [T], the end of sequence included
    teacher_log_probs: np.ndarray  # float32 [T, K]
    teacher_ids: np.ndarray  # int32 [T, K], of the tokens that have them

    @property
    def num_tokens(self) -> int:
        """Prompt and response tokens."""
        return len(self.prompt_ids) + len(self.response_ids)


def to_device(tensor: Tensor, device: Any) -> Tensor:
    """Copy a tensor to a device. The copy to a GPU does not wait for the work queued there.

    A copy from memory that is not pinned would, and the GPU then idles while the next micro-batch
    is packed.
    """
    if str(device).startswith("cuda") and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


_BY_PROMPT_TOKEN = ("prompt_ids", "prompt_mask")
_READ_BY_PACKING = (*_BY_PROMPT_TOKEN, "response_ids", "attention_mask")
_BY_RESPONSE = (
    *("scores", "group_index", "sample_index", "row_index", "minibatch", "truncated"),
    *("weight_version", "last_values", "sample_tokens"),
)
"""Fields of an Experience that are not [B, T]."""


@dataclass(frozen=True)
class Experience:
    """A padded batch with all that an update needs; prompts padded left, responses right.

    Example: prompts of 2 and 3 tokens, responses of 2 and 1 give P = 3, T = 2 and
    `prompt_mask[0] = [F, T, T]`, `response_mask[1] = [T, F]`.
    """

    prompt_ids: Tensor  # [B, P] int64
    prompt_mask: Tensor  # [B, P] bool, False on padding
    response_ids: Tensor  # [B, T] int64
    attention_mask: Tensor  # [B, T] bool, False on padding, True where an environment wrote
    response_mask: Tensor  # [B, T] bool, True on tokens that the policy sampled
    rollout_log_probs: Tensor  # [B, T] float32, as the engine reported them
    scores: Tensor  # [B] float32, before KL and shaping; NaN when scoring failed
    group_index: Tensor  # [B] int64, the samples of one draw of a prompt share it
    minibatch: Tensor  # [B] int64, which minibatch of the step trains the row
    truncated: Tensor  # [B] bool, the response ran into rollout.max_new_tokens
    weight_version: Tensor  # [B] int64, of the weights that sampled the response's first token
    turn_rewards: Tensor | None = None  # [B, T] float32, the parts of scores that turns earned
    turn_index: Tensor | None = None  # [B, T] int64, which turn of its row sampled a token
    weight_versions: Tensor | None = None  # [B, T] int64; None: that of the first, for all tokens
    sample_index: Tensor | None = None  # [B] int64, which of its draw's samples
    row_index: Tensor | None = None  # [B] int64, which of its sample's rows; None: each has one
    ref_log_probs: Tensor | None = None  # [B, T] float32
    old_log_probs: Tensor | None = None  # [B, T] float32, learner, before the update
    weights: Tensor | None = None  # [B, T] float32, of a correction; None: 1
    loss_mask: Tensor | None = None  # [B, T] bool, what the losses count; None: response_mask
    sample_tokens: Tensor | None = None  # [B] int64, those of all rows of its sample; None: its own
    covariant: Tensor | None = None  # [B, T] bool, tokens of high covariance; None: not asked
    values: Tensor | None = None  # [B, T] float32, critic, before the update
    last_values: Tensor | None = None  # [B] float32, critic, after the last token where truncated
    advantages: Tensor | None = None  # [B, T] float32
    returns: Tensor | None = None  # [B, T] float32

    def __post_init__(self) -> None:
        rows, prompt = self.prompt_ids.shape
        response = self.response_ids.shape[1]
        expected: dict[str, tuple[int, ...]] = dict.fromkeys(_BY_PROMPT_TOKEN, (rows, prompt))
        expected |= dict.fromkeys(_BY_RESPONSE, (rows,))
        for each in fields(self):
            value = getattr(self, each.name)
            shape = expected.get(each.name, (rows, response))
            assert value is None or tuple(value.shape) == shape, (
                f"Experience.{each.name} has shape {tuple(value.shape)}, expected {shape}"
            )

    def __len__(self) -> int:
        return self.prompt_ids.shape[0]

    def staleness(self, version: int) -> Tensor:
        """[B, T] int64: how many versions older than `version` the weights of each token were."""
        by_response = self.weight_version.unsqueeze(1).expand(self.response_mask.shape)
        return version - (by_response if self.weight_versions is None else self.weight_versions)

    @property
    def is_first_row(self) -> Tensor:
        """[B] bool, True on one row of each sample, for what counts samples."""
        if self.row_index is None:
            return self.scores.new_ones(len(self)).bool()
        return self.row_index == 0

    @property
    def counted(self) -> Tensor:
        """[B, T] bool, True on tokens that the losses count."""
        return self.response_mask if self.loss_mask is None else self.loss_mask

    def with_(self, **changes: Tensor) -> Experience:
        """The same batch with some fields set."""
        return replace(self, **changes)

    def to(self, device: Any) -> Experience:
        """The same batch on a device; ids stay, for they are packed on the CPU and sent packed."""
        return self._changed(
            lambda name, v: v if name in _READ_BY_PACKING else to_device(v, device)
        )

    def blank(self) -> Experience:
        """One row of one prompt and one response token that no loss counts, fields as here."""

        def row(name: str, value: Tensor) -> Tensor:
            if name in ("prompt_mask", "attention_mask"):
                return value.new_ones((1, 1))
            return value.new_zeros((1,) * value.dim())

        return self._changed(row)

    def select(self, rows: Tensor) -> Experience:
        """Some rows, trimmed to the longest prompt and response among them; rows [b] int64."""
        prompts = int(self.prompt_mask[rows].sum(1).max()) if len(rows) else 0
        responses = int(self.attention_mask[rows].sum(1).max()) if len(rows) else 0
        first = self.prompt_ids.shape[1] - prompts

        def picked(name: str, value: Tensor) -> Tensor:
            if name in _BY_PROMPT_TOKEN:
                return value[rows, first:]
            return value[rows, :responses] if value.dim() == 2 else value[rows]

        return self._changed(picked)

    def _changed(self, change: Callable[[str, Tensor], Tensor]) -> Experience:
        """The batch with each field that it has changed, by the field's name and value."""
        held = [(field.name, getattr(self, field.name)) for field in fields(self)]
        changed: dict[str, Any] = {k: v if v is None else change(k, v) for k, v in held}
        return Experience(**changed)
