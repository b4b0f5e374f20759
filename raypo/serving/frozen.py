"""Frozen models, which judge responses that others sampled: the reference and reward models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from raypo.cluster.out_of_memory import FROZEN_REMEDY, memory_advice
from raypo.config.paths import short_name
from raypo.data.batching import batches_by_tokens
from raypo.data.chat_messages import answered, render
from raypo.data.stop_tokens import ids_behind, prompt_ids
from raypo.metrics.process_memory import peak_memory
from raypo.models.host_memory import HostMemory
from raypo.models.loading import (
    load_causal_lm,
    load_reward_model,
    load_tokenizer,
    release_memory,
    same_vocabulary,
)
from raypo.models.packed_attention import reads_packed
from raypo.models.packing import pack
from raypo.models.scores import sequence_scores
from raypo.models.token_log_probs import over_logits, packed_log_probs
from raypo.serving.progress import Progress
from raypo.types import Rollout

T = TypeVar("T")
Rows = Sequence[np.ndarray]
"""Token ids of each sequence, int [P] or [T]."""
Ids = tuple[np.ndarray, np.ndarray]
"""Prompt and response, int [P] and [T]."""
Told = tuple[np.ndarray, np.ndarray]
"""Log-probs, float32 [T, K], and the ids of the tokens that have them, int32 [T, K]."""


def frozen_memory_advice(name: str) -> AbstractContextManager[None]:
    """`memory_advice` around what a frozen model does; `name` is its folder or hub id."""
    return memory_advice(f"the frozen model {short_name(name)}", FROZEN_REMEDY)


class FrozenModel:
    """A model that nobody trains, alone in its process."""

    def __init__(self, name: str, *, num_threads: int | None) -> None:
        """Settle the process.

        Args:
            name: Folder or hub id, for people.
            num_threads: Threads of this process's tensor operations; None: as they are.
        """
        self._name, self._progress = short_name(name), Progress()
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}, frozen, ready)"

    def stalled_s(self) -> float:
        """Seconds that the forward pass that is under way has taken; 0 where none is."""
        return self._progress.stalled_s()

    def peak_memory(self) -> dict[str, float]:
        """The most memory that this process has held, in GB."""
        return peak_memory()


class TorchModel(FrozenModel):
    """A network without gradients, on the GPU where there is one."""

    def __init__(
        self, name: str, network: Any, *, max_batch_tokens: int, num_threads: int | None
    ) -> None:
        """Put the network on its device.

        Args:
            name: Folder or hub id, for people.
            network: A Hugging Face model.
            max_batch_tokens: Most tokens of one forward pass.
            num_threads: Threads of this process's tensor operations; None: as they are.
        """
        super().__init__(name, num_threads=num_threads)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = network.eval().to(self._device)
        self._host = HostMemory()
        self._max_batch_tokens = max_batch_tokens

    def sleep(self) -> None:
        """Give the GPU's memory to others."""
        self._host.take([*self._model.parameters(), *self._model.buffers()], unchanged=True)
        release_memory()

    def wake_up(self) -> None:
        """Take it again."""
        self._host.give_back()

    @torch.inference_mode()
    def _in_batches(
        self,
        sequences: Sequence[tuple[np.ndarray, np.ndarray]],
        compute: Callable[[Rows, Rows], Callable[[], Sequence[T]]],
    ) -> list[T]:
        """Compute an answer for each sequence, in the order given.

        A batch's answers are read when the next batch's pass has been queued, so that a GPU does
        not idle while that one is packed.

        Args:
            sequences: Prompt and response of each.
            compute: Starts the pass over prompts and responses of as many as one forward pass may
                have; the function that it returns waits for the answers.
        """
        answers: dict[int, T] = {}
        batches = batches_by_tokens(
            [prompt.tobytes() for prompt, _ in sequences],
            [len(prompt) for prompt, _ in sequences],
            [len(response) for _, response in sequences],
            self._max_batch_tokens,
            is_packed=reads_packed(self._model),
        )
        earlier: list[int] = []
        answers_of_earlier: Callable[[], Sequence[T]] = list
        for rows in [*batches, []]:  # the last turn only reads
            with frozen_memory_advice(self._name), self._progress.at_work():
                started: Callable[[], Sequence[T]] = list
                if rows:
                    prompts, responses = zip(*(sequences[row] for row in rows), strict=True)
                    started = compute(prompts, responses)
                answers |= zip(earlier, answers_of_earlier(), strict=True)
            earlier, answers_of_earlier = rows, started
        return [answers[row] for row in range(len(sequences))]


class ReferenceModel(TorchModel):
    """One replica of the reference: rollouts in, log-probs of their response tokens out."""

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        temperature: float,
        max_batch_tokens: int,
        attention: str = "auto",
        num_threads: int | None = None,
    ) -> None:
        """Load the model onto the GPU where there is one.

        Args:
            model: Folder or hub id.
            dtype: float32 or bfloat16.
            temperature: The one that the responses are sampled at.
            max_batch_tokens: Most tokens of one forward pass.
            attention: `model.attention`.
            num_threads: Threads of this process's tensor operations; None: as they are.
        """
        with frozen_memory_advice(model):
            network = load_causal_lm(model, dtype=dtype, attention=attention)
            super().__init__(
                model, network, max_batch_tokens=max_batch_tokens, num_threads=num_threads
            )
        self._temperature = temperature

    def log_probs(self, rollouts: list[Rollout]) -> list[np.ndarray]:
        """float32 [T] for each rollout, in the order given."""
        sequences = [(rollout.prompt_ids, rollout.response_ids) for rollout in rollouts]
        return self._in_batches(sequences, self._log_probs_of)

    def _log_probs_of(self, prompts: Rows, responses: Rows) -> Callable[[], list[np.ndarray]]:
        packed = pack(prompts, responses, device=self._device)
        log_probs, _ = packed_log_probs(self._model, packed, temperature=self._temperature)
        ends = np.cumsum([len(response) for response in responses])
        return lambda: np.split(log_probs.float().cpu().numpy(), ends[:-1])

    def top_log_probs(self, sequences: Sequence[Ids], count: int, vocabulary: int) -> list[Told]:
        """Of each response token the likeliest tokens in its place, at temperature 1.

        Args:
            sequences: Prompt and response, int [P] and [T].
            count: How many tokens, at most `vocabulary`.
            vocabulary: Tokens that there are; further logits are none's.
        """

        def of_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
            top = logits[:, :vocabulary].float().log_softmax(-1).topk(count)
            return top.values, top.indices.to(torch.int32)

        def compute(prompts: Rows, responses: Rows) -> Callable[[], list[Told]]:
            packed = pack(prompts, responses, device=self._device)
            ends = np.cumsum([len(response) for response in responses])[:-1]
            found = over_logits(self._model, packed, of_logits)
            return lambda: list(
                zip(*(np.split(each.cpu().numpy(), ends) for each in found), strict=True)
            )

        return self._in_batches(sequences, compute)


class RewardModel(TorchModel):
    """One replica of a reward model: rollouts in, a score each out.

    Where its vocabulary is the policy's it reads the policy's token ids. Elsewhere prompt and
    response are encoded anew from their text (chat messages through its own chat template), with
    an end of sequence where the response had one.
    """

    def __init__(
        self,
        model: str,
        *,
        policy: str | None,
        dtype: str,
        max_batch_tokens: int,
        attention: str = "auto",
        num_threads: int | None = None,
    ) -> None:
        """Load the model onto the GPU where there is one.

        Args:
            model: Folder or hub id of a sequence classifier with one label.
            policy: Folder or hub id of the policy, whose vocabulary is compared; None: texts are
                encoded, whatever the policy is.
            dtype: float32 or bfloat16.
            max_batch_tokens: Most tokens of one forward pass.
            attention: `model.attention`.
            num_threads: Threads of this process's tensor operations; None: as they are.
        """
        with frozen_memory_advice(model):
            network = load_reward_model(model, dtype=dtype, attention=attention)
            super().__init__(
                model, network, max_batch_tokens=max_batch_tokens, num_threads=num_threads
            )
        is_shared = policy is not None and same_vocabulary(model, policy, key="model.reward")
        self._tokenizer = None if is_shared else load_tokenizer(model, key="model.reward")

    def score(self, rollouts: list[Rollout]) -> list[float]:
        """A score for each rollout, in the order given; NaN for one without tokens."""
        sequences = [sequence_ids(self._tokenizer, rollout) for rollout in rollouts]
        with_tokens = [(prompt, response) for prompt, response in sequences if len(prompt)]
        scores = iter(self._in_batches(with_tokens, self._scores_of))
        return [next(scores) if len(prompt) else float("nan") for prompt, _ in sequences]

    def _scores_of(self, prompts: Rows, responses: Rows) -> Callable[[], list[float]]:
        return sequence_scores(self._model, prompts, responses).tolist


def sequence_ids(tokenizer: Any | None, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """Prompt and response as a reward model reads them, int [P] and [T].

    Args:
        tokenizer: The reward model's; None: it has the policy's vocabulary. Elsewhere the text is
            encoded as a whole, and stands in the place of the prompt.
    """
    if tokenizer is None:
        return rollout.prompt_ids, rollout.response_ids
    return np.asarray(_encode(tokenizer, rollout), dtype=np.int64), np.zeros(0, np.int64)


def _encode(tokenizer: Any, rollout: Rollout) -> list[int]:
    """Prompt and response in another vocabulary."""
    ids: list[int]
    if rollout.messages and tokenizer.chat_template:
        said = answered(rollout.messages, {"role": "assistant", "content": rollout.response})
        text = render(tokenizer, said)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
    (ids,) = prompt_ids(tokenizer, [rollout.prompt])
    ids = ids + ids_behind(tokenizer, [rollout.response], [rollout.prompt])[0]
    end: int | None = tokenizer.eos_token_id
    return [*ids, end] if rollout.finish_reason == "stop" and end is not None else ids
