"""Policy and reward model as modules for training.

B responses, T response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from raypo.models.scores import sequence_scores
from raypo.models.token_log_probs import response_log_probs
from raypo.types import Experience


class Policy(nn.Module):
    """Causal language model that returns the log-probs of given responses."""

    def __init__(self, model: Any, *, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature

    def forward(
        self, batch: Experience, *, with_entropy: bool = False, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs [B, T] float32, and entropies [B, T] of the tempered distribution.

        The entropies are None without `with_entropy`. `entropy_grad` makes them differentiable.
        """
        return response_log_probs(
            self.model,
            batch.prompt_ids,
            batch.prompt_mask,
            batch.response_ids,
            batch.attention_mask,
            temperature=self.temperature,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
            device=batch.response_mask.device,
            experts=batch.experts,
            images=batch.images,
        )


class SequenceScorer(nn.Module):
    """Sequence classifier with one label, for training a reward model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray]) -> Tensor:
        """Return scores [B] float32 of prompts with their responses."""
        return sequence_scores(self.model, prompts, responses)
