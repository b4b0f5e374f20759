"""A frozen reward model: scores of responses that others sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from raypo.data.batching import batches_by_tokens
from raypo.models.loading import load_reward_model, load_tokenizer, same_vocabulary
from raypo.models.scores import sequence_scores
from raypo.serving.frozen import TorchModel, frozen_memory_advice
from raypo.types import Rollout


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
        is_shared = policy is not None and same_vocabulary(model, policy)
        self._tokenizer = None if is_shared else load_tokenizer(model)

    def score(self, rollouts: list[Rollout]) -> list[float]:
        """A score for each rollout, in the order given; NaN for one without tokens."""
        sequences = [sequence_ids(self._tokenizer, rollout) for rollout in rollouts]
        scores = [float("nan")] * len(rollouts)
        rows = [row for row, (prompt, _) in enumerate(sequences) if len(prompt)]
        batches = batches_by_tokens(
            [sequences[row][0].tobytes() for row in rows],
            [len(sequences[row][0]) for row in rows],
            [len(sequences[row][1]) for row in rows],
            self._max_batch_tokens,
        )
        for batch in batches:
            members = [rows[i] for i in batch]
            prompts, responses = zip(*(sequences[row] for row in members), strict=True)
            with frozen_memory_advice(self._name), torch.inference_mode():
                values = sequence_scores(self._model, prompts, responses)
            for row, value in zip(members, values.tolist(), strict=True):
                scores[row] = value
        return scores


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
        answered = [*rollout.messages, {"role": "assistant", "content": rollout.response}]
        text = tokenizer.apply_chat_template(answered, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
    ids = tokenizer(rollout.prompt)["input_ids"]
    if ids and ids[-1] == tokenizer.eos_token_id:  # some tokenizers end every text
        ids = ids[:-1]
    ids = ids + tokenizer(rollout.response, add_special_tokens=False)["input_ids"]
    end: int | None = tokenizer.eos_token_id
    return [*ids, end] if rollout.finish_reason == "stop" and end is not None else ids
