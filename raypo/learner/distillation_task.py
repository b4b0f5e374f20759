"""Distillation: a policy learns a teacher's distribution at every response token.

M response tokens of some examples, K tokens per position with log-probs of the teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raypo.config import DistillationSection
from raypo.learner.tasks import PolicyTask, Sums
from raypo.models.networks import Policy
from raypo.models.packing import pack
from raypo.models.token_log_probs import over_logits
from raypo.ppo.divergences import divergences
from raypo.types import Experience, Taught, to_device

_TOKEN = np.zeros(1, np.int32)


class Student(Policy):
    """Policy that also computes its divergence from a teacher."""

    def __init__(self, model: Any, section: DistillationSection, *, vocabulary: int) -> None:
        """Wrap a model.

        Args:
            model: A causal language model.
            section: Kind of divergence.
            vocabulary: Size of the vocabulary; logits beyond it are padding.
        """
        super().__init__(model, temperature=1.0)
        self._section, self._vocabulary = section, vocabulary

    def forward(self, batch: Experience | Sequence[Taught], **arguments: Any) -> Any:
        """Return log-probs of an experience (as `Policy`), or divergences [M] of taught items."""
        if isinstance(batch, Experience):
            return super().forward(batch, **arguments)
        device = self.model.get_output_embeddings().weight.device

        def of_logits(logits: Tensor, log_probs: Tensor, ids: Tensor) -> tuple[Tensor]:
            section, vocabulary = self._section, self._vocabulary
            return (
                divergences(
                    logits,
                    log_probs,
                    ids,
                    kind=section.divergence,
                    beta=section.beta,
                    vocabulary=vocabulary,
                ),
            )

        packed = pack(
            [item.prompt_ids for item in batch],
            [item.response_ids for item in batch],
            device=device,
        )
        log_probs = torch.from_numpy(np.concatenate([each.teacher_log_probs for each in batch]))
        ids = torch.from_numpy(np.concatenate([each.teacher_ids for each in batch])).long()
        known = (to_device(each, device) for each in (log_probs, ids))
        return over_logits(self.model, packed, of_logits, *known)[0]


class DistillationTask(PolicyTask[Taught]):
    """Distillation task: minimise the divergence from the teacher (`raypo.ppo.divergences`)."""

    blank = Taught(_TOKEN, _TOKEN, np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int32))

    def __init__(self, model: Any, section: DistillationSection, *, vocabulary: int) -> None:
        """Wrap a causal language model; arguments as for `Student`."""
        self.module = Student(model, section, vocabulary=vocabulary)

    def weight(self, item: Taught) -> float:
        """Return the number of response tokens."""
        return float(len(item.response_ids))

    def loss(self, model: Any, items: Sequence[Taught], device: Any) -> tuple[Tensor, Sums]:
        """Return the summed divergence, and the probability mass that the teacher reported."""
        found = model(items)  # [M]
        told = np.concatenate([np.exp(item.teacher_log_probs).sum(-1) for item in items])
        tokens = float(len(told))
        total = found.sum()
        return total, {
            "loss": (total.detach(), tokens),
            "teacher_told": (float(told.sum()), tokens),
        }
