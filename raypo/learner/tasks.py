"""Tasks of recipes that train on examples: responses (sft) or pairs (reward_model).

Preference tasks of a policy (dpo) are in `raypo.learner.preference_tasks`.

B examples, T response tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, SupportsFloat, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from raypo.collectives import Workers
from raypo.data.padding import pad_left, pad_right
from raypo.models.networks import Policy, SequenceScorer
from raypo.types import Example, Experience, Pair, Taught, Verdict, to_device

Item = TypeVar("Item", Example, Pair, Verdict, Taught)
Sums = dict[str, tuple[SupportsFloat, SupportsFloat]]
"""Metrics by name. Each is a sum of values and a sum of weights, whose quotient is the mean. The
sums stay tensors on the model's device, because reading one would block."""


class Task(ABC, Generic[Item]):
    """Training task: a module, and a loss that is a sum over examples."""

    module: Policy | SequenceScorer
    """The module to train."""
    blank: Item
    """Shortest example: the placeholder in a pass without examples. Its loss is multiplied by 0."""
    name: str
    """Name of the saved model's folder in the run's folder."""

    def weight(self, item: Item) -> float:
        """Return an example's weight in the mean loss.

        The default is 1. A task with a mean over tokens returns the example's number of tokens.
        """
        return 1.0

    def before_losses(
        self, model: Any, pieces: Sequence[Sequence[Item]], workers: Workers, device: Any
    ) -> None:
        """Compute statistics of the whole batch that the loss needs. The default does nothing.

        Args:
            model: The model under DeepSpeed.
            pieces: This worker's microbatches. All workers have the same number; some may be empty.
            workers: All workers.
            device: Device of the model.
        """

    @abstractmethod
    def loss(self, model: Any, items: Sequence[Item], device: Any) -> tuple[Tensor, Sums]:
        """Return the summed loss of some examples, not divided by their number, and metrics."""

    @property
    def network(self) -> Any:
        """Hugging Face model inside the module. Saved weights have its weight names."""
        return self.module.model


class PolicyTask(Task[Item]):
    """Task of a policy."""

    name = "policy"

    def __init__(self, model: Any) -> None:
        """Wrap a causal language model."""
        self.module = Policy(model, temperature=1.0)


class ResponseTask(PolicyTask[Example]):
    """Supervised fine-tuning: negative log-likelihood of the responses' tokens."""

    blank = Example(np.zeros(1, np.int32), np.zeros(1, np.int32))

    def weight(self, item: Example) -> float:
        """Return the number of response tokens that count in the loss."""
        return float(item.num_learned)

    def loss(self, model: Any, items: Sequence[Example], device: Any) -> tuple[Tensor, Sums]:
        """Return the summed loss of the response tokens that count, and its metric."""
        batch = response_batch(items).to(device)
        log_probs, _ = model(batch)  # [B, T]
        total = -torch.where(batch.response_mask, log_probs, 0.0).sum()
        return total, {"loss": (total.detach(), batch.response_mask.sum())}


class PairTask(Task[Pair]):
    """Reward model task: the chosen response should score higher than the rejected one.

    Bradley-Terry loss: -log sigmoid(chosen - rejected - margin) (arXiv:2203.02155 eq. 1; the margin
    arXiv:2307.09288 eq. 2), plus `centering_coef` times the square of the sum of the two scores
    (arXiv:2312.09244 eq. 2).
    """

    name = "reward_model"
    blank = Pair(np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))

    def __init__(self, model: Any, *, centering_coef: float) -> None:
        """Wrap a sequence classifier with one label."""
        self.module = SequenceScorer(model)
        self._centering_coef = centering_coef

    def loss(self, model: Any, items: Sequence[Pair], device: Any) -> tuple[Tensor, Sums]:
        """Return the loss of the pairs, and their accuracy and scores."""
        prompts = [pair.prompt_ids for pair in items] * 2
        responses = [pair.chosen_ids for pair in items] + [pair.rejected_ids for pair in items]
        better, worse = model(prompts, responses).chunk(2)  # [B] each
        margins = to_device(torch.tensor([pair.margin for pair in items]), device)
        losses = -logsigmoid(better - worse - margins)
        losses = losses + self._centering_coef * (better + worse).square()
        count = float(len(items))
        better, worse = better.detach(), worse.detach()
        right = (better > worse).float() + 0.5 * (better == worse).float()
        sums: Sums = {
            "loss": (losses.detach().sum(), count),
            "accuracy": (right.sum(), count),
            "score_gap_mean": ((better - worse).sum(), count),
            "pair_score_mean": ((better + worse).sum(), 2.0 * count),
        }
        return losses.sum(), sums


def response_batch(items: Sequence[Example]) -> Experience:
    """Convert examples to a padded batch; fields that only rollouts have are zero."""
    count = len(items)
    lengths = [np.ones(len(item.response_ids)) for item in items]
    learned = [
        full if item.mask is None else item.mask for item, full in zip(items, lengths, strict=True)
    ]
    mask = pad_right(lengths, torch.bool)
    images = tuple(item.images for item in items)
    return Experience(
        prompt_ids=pad_left([item.prompt_ids for item in items], torch.int64),
        prompt_mask=pad_left([np.ones(len(item.prompt_ids)) for item in items], torch.bool),
        response_ids=pad_right([item.response_ids for item in items], torch.int64),
        attention_mask=mask,
        response_mask=pad_right(learned, torch.bool),
        rollout_log_probs=torch.zeros(mask.shape),
        scores=torch.zeros(count),
        group_index=torch.zeros(count, dtype=torch.int64),
        minibatch=torch.zeros(count, dtype=torch.int64),
        truncated=torch.zeros(count, dtype=torch.bool),
        weight_version=torch.zeros(count, dtype=torch.int64),
        images=images if any(images) else None,
    )
