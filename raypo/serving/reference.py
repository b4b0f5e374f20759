"""The frozen reference policy: log-probs of responses that others sampled."""

from __future__ import annotations

import numpy as np
import torch

from raypo.data.batching import batches_by_tokens
from raypo.models.loading import load_causal_lm
from raypo.models.packing import pack
from raypo.models.token_log_probs import packed_log_probs
from raypo.serving.frozen import TorchModel, frozen_memory_advice
from raypo.types import Rollout


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
        answers = [np.zeros(0, dtype=np.float32)] * len(rollouts)
        batches = batches_by_tokens(
            [rollout.prompt_ids.tobytes() for rollout in rollouts],
            [len(rollout.prompt_ids) for rollout in rollouts],
            [len(rollout.response_ids) for rollout in rollouts],
            self._max_batch_tokens,
        )
        for rows in batches:
            with frozen_memory_advice(self._name):
                told = self._batch([rollouts[row] for row in rows])
            for row, values in zip(rows, told, strict=True):
                answers[row] = values
        return answers

    @torch.inference_mode()
    def _batch(self, rollouts: list[Rollout]) -> list[np.ndarray]:
        packed = pack(
            [rollout.prompt_ids for rollout in rollouts],
            [rollout.response_ids for rollout in rollouts],
            device=self._device,
        )
        log_probs, _ = packed_log_probs(self._model, packed, temperature=self._temperature)
        ends = np.cumsum([len(rollout.response_ids) for rollout in rollouts])
        return np.split(log_probs.float().cpu().numpy(), ends[:-1])
