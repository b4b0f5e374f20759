"""Reference and reward models: frozen networks that evaluate sampled responses."""

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
from raypo.data.special_tokens import hidden
from raypo.data.stop_tokens import ids_behind, prompt_ids
from raypo.metrics.process_memory import peak_memory
from raypo.models.compiled_layers import compile_on_gpus
from raypo.models.host_memory import HostMemory
from raypo.models.linear import with_float32_logits
from raypo.models.loading import (
    load_causal_lm,
    load_reward_model,
    load_tokenizer,
    release_memory,
    same_vocabulary,
)
from raypo.models.packed_attention import reads_packed
from raypo.models.packing import digest_of, pack
from raypo.models.scores import sequence_scores
from raypo.models.token_log_probs import over_logits, packed_log_probs
from raypo.models.warm_up import made_up_sequences
from raypo.serving.progress import Progress
from raypo.types import Images, Rollout

T = TypeVar("T")
Rows = Sequence[np.ndarray]
"""Token ids of each sequence, int [P] or [T]."""
Ids = tuple[np.ndarray, np.ndarray]
"""Token ids of prompt and response, int [P] and [T]."""
TopTokens = tuple[np.ndarray, np.ndarray]
"""Top tokens at each response position: log-probs, float32 [T, K], and token ids, int32 [T, K]."""


def frozen_memory_advice(name: str) -> AbstractContextManager[None]:
    """Return `memory_advice` for a frozen model; `name` is its folder or hub id."""
    return memory_advice(f"the frozen model {short_name(name)}", FROZEN_REMEDY)


class FrozenModel:
    """Base class of models that are not trained; each has its own process."""

    def __init__(self, name: str, *, num_threads: int | None) -> None:
        """Set the number of threads.

        Args:
            name: Folder or hub id, for messages.
            num_threads: CPU threads for tensor operations. None keeps the current number.
        """
        self._name, self._progress = short_name(name), Progress()
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}, frozen, ready)"

    def stalled_s(self) -> float:
        """Return how long the current forward pass has been running, in seconds, or 0 if idle."""
        return self._progress.stalled_s()

    def peak_memory(self) -> dict[str, float]:
        """Return the peak memory of this process, in GB."""
        return peak_memory()


class TorchModel(FrozenModel):
    """Frozen network in torch, on the GPU if there is one."""

    def __init__(
        self, name: str, network: Any, *, max_batch_tokens: int, num_threads: int | None
    ) -> None:
        """Move the network to its device.

        Args:
            name: Folder or hub id, for messages.
            network: A Hugging Face model.
            max_batch_tokens: Maximum number of tokens of one forward pass.
            num_threads: CPU threads for tensor operations. None keeps the current number.
        """
        super().__init__(name, num_threads=num_threads)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = network.eval().to(self._device)
        self._host = HostMemory()
        self._max_batch_tokens = max_batch_tokens

    def sleep(self) -> None:
        """Free the GPU's memory: offload the network to the host."""
        self._host.take([*self._model.parameters(), *self._model.buffers()], unchanged=True)
        release_memory()

    def wake_up(self) -> None:
        """Move the network back to the GPU."""
        self._host.give_back()

    @torch.inference_mode()
    def _in_batches(
        self,
        sequences: Sequence[tuple[np.ndarray, np.ndarray]],
        compute: Callable[..., Callable[[], Sequence[T]]],
        images: Sequence[Images | None] | None = None,
    ) -> list[T]:
        """Compute a result for each sequence, in the order given.

        Args:
            sequences: Prompt and response of each sequence.
            compute: Function `(prompts, responses)` that starts one forward pass. It returns a
                function that waits for the results. With `images` it gets those of its rows, too.
            images: Images of each prompt. None means that the model reads only text.
        """
        answers: dict[int, T] = {}
        batches = batches_by_tokens(
            [
                prompt.tobytes() + digest_of(images, row)
                for row, (prompt, _) in enumerate(sequences)
            ],
            [len(prompt) for prompt, _ in sequences],
            [len(response) for _, response in sequences],
            self._max_batch_tokens,
            is_packed=reads_packed(self._model),
        )
        earlier: list[int] = []
        answers_of_earlier: Callable[[], Sequence[T]] = list
        # Read a batch's results after the next pass is queued, so that the GPU does not idle while
        # the next batch is packed. The empty batch at the end only reads the last results.
        for rows in [*batches, []]:
            with frozen_memory_advice(self._name), self._progress.at_work():
                started: Callable[[], Sequence[T]] = list
                if rows:
                    read = [*zip(*(sequences[row] for row in rows), strict=True)]
                    if images is not None:
                        read.append(tuple(images[row] for row in rows))
                    started = compute(*read)
                answers |= zip(earlier, answers_of_earlier(), strict=True)
            earlier, answers_of_earlier = rows, started
        return [answers[row] for row in range(len(sequences))]


class ReferenceModel(TorchModel):
    """One replica of the reference model: rollouts in, log-probs of their response tokens out."""

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        temperature: float,
        max_batch_tokens: int,
        head_dtype: str = "model",
        attention: str = "auto",
        compile_layers: bool = False,
        num_threads: int | None = None,
        warms_up: bool = False,
    ) -> None:
        """Load the model, onto the GPU if there is one.

        Args:
            model: Folder or hub id.
            dtype: float32 or bfloat16.
            temperature: Sampling temperature of the responses.
            max_batch_tokens: Maximum number of tokens of one forward pass.
            head_dtype: `model.head_dtype`.
            attention: `model.attention`.
            compile_layers: `learner.compile_layers`.
            num_threads: CPU threads for tensor operations. None keeps the current number.
            warms_up: Whether to compile the kernels for a GPU now, instead of in the first call.
        """
        with frozen_memory_advice(model):
            network = load_causal_lm(model, dtype=dtype, attention=attention)
            if head_dtype == "float32":
                network = with_float32_logits(network)
            if compile_layers:
                compile_on_gpus(network)
            super().__init__(
                model, network, max_batch_tokens=max_batch_tokens, num_threads=num_threads
            )
        self._temperature = temperature
        if warms_up and self._device == "cuda":
            self._in_batches(made_up_sequences(), self._log_probs_of)

    def log_probs(self, rollouts: list[Rollout]) -> list[np.ndarray]:
        """Return each response's log-probs in nats, float32 [T], in the order given."""
        sequences = [(rollout.prompt_ids, rollout.response_ids) for rollout in rollouts]
        images = [rollout.images for rollout in rollouts]
        return self._in_batches(sequences, self._log_probs_of, images)

    def _log_probs_of(
        self, prompts: Rows, responses: Rows, images: Sequence[Images | None] | None = None
    ) -> Callable[[], list[np.ndarray]]:
        packed = pack(prompts, responses, device=self._device, images=images)
        log_probs, _ = packed_log_probs(self._model, packed, temperature=self._temperature)
        ends = np.cumsum([len(response) for response in responses])
        return lambda: np.split(log_probs.float().cpu().numpy(), ends[:-1])

    def top_log_probs(
        self, sequences: Sequence[Ids], count: int, vocabulary: int
    ) -> list[TopTokens]:
        """Return the likeliest tokens at each response position, at temperature 1.

        Args:
            sequences: Prompt and response, int [P] and [T].
            count: Number K of tokens per position, at most `vocabulary`.
            vocabulary: Size of the vocabulary. Logits beyond it are padding and are ignored.

        Returns:
            For each sequence log-probs, float32 [T, K], and token ids, int32 [T, K], best first.
        """

        def of_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
            top = logits[:, :vocabulary].float().log_softmax(-1).topk(count)
            return top.values, top.indices.to(torch.int32)

        def compute(prompts: Rows, responses: Rows) -> Callable[[], list[TopTokens]]:
            packed = pack(prompts, responses, device=self._device)
            ends = np.cumsum([len(response) for response in responses])[:-1]
            found = over_logits(self._model, packed, of_logits)
            return lambda: list(
                zip(*(np.split(each.cpu().numpy(), ends) for each in found), strict=True)
            )

        return self._in_batches(sequences, compute)


class RewardModel(TorchModel):
    """One replica of a reward model: rollouts in, one score for each out.

    If it shares the policy's vocabulary, it reads the policy's token ids. If not, it encodes the
    text of prompt and response with its own tokenizer and chat template, and appends an
    end-of-sequence token if the response ended with one.
    """

    def __init__(
        self,
        model: str,
        *,
        policy: str | None,
        dtype: str,
        max_batch_tokens: int,
        attention: str = "auto",
        compile_layers: bool = False,
        num_threads: int | None = None,
    ) -> None:
        """Load the model, onto the GPU if there is one.

        Args:
            model: Folder or hub id of a sequence classifier with one label.
            policy: Folder or hub id of the policy, to compare vocabularies. None means always
                encode the text.
            dtype: float32 or bfloat16.
            max_batch_tokens: Maximum number of tokens of one forward pass.
            attention: `model.attention`.
            compile_layers: `learner.compile_layers`.
            num_threads: CPU threads for tensor operations. None keeps the current number.
        """
        with frozen_memory_advice(model):
            network = load_reward_model(model, dtype=dtype, attention=attention)
            if compile_layers:
                compile_on_gpus(network)
            super().__init__(
                model, network, max_batch_tokens=max_batch_tokens, num_threads=num_threads
            )
        is_shared = policy is not None and same_vocabulary(model, policy, key="model.reward")
        self._tokenizer = None if is_shared else load_tokenizer(model, key="model.reward")

    def score(self, rollouts: list[Rollout]) -> list[float]:
        """Return one score for each rollout, in the order given. An empty rollout gets NaN."""
        sequences = [sequence_ids(self._tokenizer, rollout) for rollout in rollouts]
        with_tokens = [(prompt, response) for prompt, response in sequences if len(prompt)]
        scores = iter(self._in_batches(with_tokens, self._scores_of))
        return [next(scores) if len(prompt) else float("nan") for prompt, _ in sequences]

    def _scores_of(self, prompts: Rows, responses: Rows) -> Callable[[], list[float]]:
        return sequence_scores(self._model, prompts, responses).tolist


def sequence_ids(tokenizer: Any | None, rollout: Rollout) -> tuple[np.ndarray, np.ndarray]:
    """Return prompt and response as a reward model reads them, int [P] and [T].

    Args:
        tokenizer: Tokenizer of the reward model; it encodes the whole text, which is returned as
            the prompt with an empty response. None means the policy's token ids are used.
        rollout: The rollout.
    """
    if tokenizer is None:
        return rollout.prompt_ids, rollout.response_ids
    return np.asarray(_encode(tokenizer, rollout), dtype=np.int64), np.zeros(0, np.int64)


def _encode(tokenizer: Any, rollout: Rollout) -> list[int]:
    """Encode prompt and response with another tokenizer."""
    ids: list[int]
    if rollout.messages and tokenizer.chat_template:
        said = answered(rollout.messages, {"role": "assistant", "content": rollout.response})
        text = render(tokenizer, said)
        return ids_behind(tokenizer, [text], [None])[0]
    (ids,) = prompt_ids(tokenizer, [rollout.prompt])
    # A response cannot end its turn and begin another one by the text of special tokens.
    response = hidden(tokenizer, rollout.response, "text")
    ids = ids + ids_behind(tokenizer, [response], [rollout.prompt])[0]
    end: int | None = tokenizer.eos_token_id
    return [*ids, end] if rollout.finish_reason == "stop" and end is not None else ids
