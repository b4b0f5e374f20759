"""Distillation: a policy learns a teacher's distribution at every response token.

M response tokens of all examples in a batch, K tokens per position with teacher log-probs.
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
from raypo.models.sequence_parallel import sliced
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

    def forward(
        self, batch: Experience | Sequence[Taught], *, top_k: int | None = None, **arguments: Any
    ) -> Any:
        """Evaluate the model on an experience, or on responses with a teacher's log-probs.

        Returns:
            For an experience, the results of `Policy.forward`. For `Taught` items, the divergence
            from the teacher at each response token, [M]. For `Taught` items with `top_k`, the
            model's K likeliest tokens at each response token, best first: log-probs, float32
            [M, K], and token ids, int64 [M, K].
        """
        if isinstance(batch, Experience):
            return super().forward(batch, **arguments)
        device = self.model.get_output_embeddings().weight.device

        def top_of_logits(logits: Tensor) -> tuple[Tensor, Tensor]:
            top = logits[:, : self._vocabulary].float().log_softmax(-1).topk(top_k or 1)
            return top.values, top.indices

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
        packed = sliced(packed, self.sequence_group)
        if top_k is not None:
            return tuple(map(packed.joined, over_logits(self.model, packed, top_of_logits)))
        log_probs = torch.from_numpy(np.concatenate([item.teacher_log_probs for item in batch]))
        ids = torch.from_numpy(np.concatenate([item.teacher_ids for item in batch])).long()
        targets = (packed.own(to_device(tensor, device)) for tensor in (log_probs, ids))
        return packed.joined(over_logits(self.model, packed, of_logits, *targets)[0])


class DistillationTask(PolicyTask[Taught]):
    """Distillation task: minimise the divergence from the teacher (`raypo.ppo.divergences`)."""

    blank = Taught(_TOKEN, _TOKEN, np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int32))

    def __init__(self, model: Any, section: DistillationSection, *, vocabulary: int) -> None:
        """Wrap a causal language model; arguments as for `Student`."""
        self.module = Student(model, section, vocabulary=vocabulary)
        self._count = min(section.top_k or vocabulary, vocabulary)

    def top_log_probs(
        self, model: Any, items: Sequence[Taught], device: Any
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the model's K likeliest tokens at each response position of each item.

        Returns:
            For each item log-probs, float32 [T, K], and token ids, int32 [T, K].
        """
        top = model(items, top_k=self._count)
        ends = np.cumsum([len(item.response_ids) for item in items])[:-1]
        log_probs, ids = (np.split(tensor.cpu().numpy(), ends) for tensor in top)
        return list(zip(log_probs, (tensor.astype(np.int32) for tensor in ids), strict=True))

    def weight(self, item: Taught) -> float:
        """Return the number of response tokens."""
        return float(len(item.response_ids))

    def loss(self, model: Any, items: Sequence[Taught], device: Any) -> tuple[Tensor, Sums]:
        """Return the summed divergence, and metrics.

        The metric `teacher_told` is the teacher's probability of its K known tokens together.
        """
        by_token = model(items)  # [M]
        known_shares = np.concatenate([np.exp(item.teacher_log_probs).sum(-1) for item in items])
        tokens = float(len(known_shares))
        total = by_token.sum()
        return total, {
            "loss": (total.detach(), tokens),
            "teacher_told": (float(known_shares.sum()), tokens),
        }
