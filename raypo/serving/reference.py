"""The frozen reference policy: log-probs of responses that others sampled."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raypo.data.batching import batches_by_tokens
from raypo.models.loading import load_causal_lm
from raypo.models.token_log_probs import response_log_probs
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
        num_threads: int | None = None,
    ) -> None:
        """Load the model onto the GPU where there is one.

        Args:
            model: Folder or hub id.
            dtype: float32 or bfloat16.
            temperature: The one that the responses are sampled at.
            max_batch_tokens: Most tokens, padding included, of one forward pass.
            num_threads: Threads of this process's tensor operations; None: as they are.
        """
        with frozen_memory_advice(model):
            network = load_causal_lm(model, dtype=dtype)
            super().__init__(
                model, network, max_batch_tokens=max_batch_tokens, num_threads=num_threads
            )
        self._temperature = temperature

    def log_probs(self, rollouts: list[Rollout]) -> list[np.ndarray]:
        """float32 [T] for each rollout, in the order given, at the sampling temperature."""
        answers = [np.zeros(0, dtype=np.float32)] * len(rollouts)
        rows = [row for row, rollout in enumerate(rollouts) if len(rollout.response_ids)]
        lengths = [rollouts[row].num_tokens for row in rows]
        for batch in batches_by_tokens(lengths, self._max_batch_tokens):
            members = [rows[i] for i in batch]
            with frozen_memory_advice(self._name):
                told = self._batch([rollouts[row] for row in members])
            for row, values in zip(members, told, strict=True):
                answers[row] = values
        return answers

    @torch.inference_mode()
    def _batch(self, rollouts: list[Rollout]) -> list[np.ndarray]:
        ids, mask = right_aligned(rollouts)  # [B, L] each
        longest = max(len(rollout.response_ids) for rollout in rollouts)
        ids, mask = ids.to(self._device), mask.to(self._device)
        log_probs, _ = response_log_probs(
            self._model,
            ids[:, :-longest],
            mask[:, :-longest],
            ids[:, -longest:],
            mask[:, -longest:],
            temperature=self._temperature,
        )
        values = log_probs.float().cpu().numpy()
        return [
            row[-len(rollout.response_ids) :].copy()
            for row, rollout in zip(values, rollouts, strict=True)
        ]


def right_aligned(rollouts: list[Rollout]) -> tuple[Tensor, Tensor]:
    """Prompt and response of each rollout as one row that ends at the last column.

    No row is padded beyond the longest one, and the last columns hold every response, a short
    one together with the end of its prompt.

    Returns:
        ids: [B, L] int64, zero where padded.
        mask: [B, L] bool, False where padded.
    """
    width = max(rollout.num_tokens for rollout in rollouts)
    ids = torch.zeros(len(rollouts), width, dtype=torch.int64)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        tokens = np.concatenate([rollout.prompt_ids, rollout.response_ids])
        ids[row, width - len(tokens) :] = torch.from_numpy(tokens.astype(np.int64))
        mask[row, width - len(tokens) :] = True
    return ids, mask
