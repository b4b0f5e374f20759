"""What recipes learn from examples: responses (sft) or pairs (reward_model).

What a policy learns from preferences (dpo) is in `raypo.learner.preference_tasks`.

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
"""Figure -> sum of its values and how much they count for. Sums stay tensors on the model's device:
to read one would wait for the device's work."""


class Task(ABC, Generic[Item]):
    """What is learned from examples: a module, and a loss that is a sum of its examples' losses."""

    module: Policy | SequenceScorer
    """What is trained."""
    blank: Item
    """The shortest example: it takes part in a pass, and its loss is multiplied by zero."""
    name: str
    """Folder of the saved model in the run's folder."""

    def weight(self, item: Item) -> float:
        """What an example counts for in the mean: as one, where its tokens do not count."""
        return 1.0

    def before_losses(
        self, model: Any, pieces: Sequence[Sequence[Item]], workers: Workers, device: Any
    ) -> None:
        """Find out what a loss needs to know of the whole batch; most need nothing.

        Args:
            pieces: This worker's microbatches; every worker has as many, some of them empty.
        """

    @abstractmethod
    def loss(self, model: Any, items: Sequence[Item], device: Any) -> tuple[Tensor, Sums]:
        """The summed loss of some examples, not yet divided, and metrics of them."""

    @property
    def network(self) -> Any:
        """The Hugging Face model, whose names the saved weights have."""
        return self.module.model


class PolicyTask(Task[Item]):
    """What a policy learns from examples."""

    name = "policy"

    def __init__(self, model: Any) -> None:
        """A causal language model."""
        self.module = Policy(model, temperature=1.0)


class ResponseTask(PolicyTask[Example]):
    """Supervised fine-tuning: the negative log-likelihood of the responses' tokens."""

    blank = Example(np.zeros(1, np.int32), np.zeros(1, np.int32))

    def weight(self, item: Example) -> float:
        """Its response tokens that are learned."""
        return float(item.num_learned)

    def loss(self, model: Any, items: Sequence[Example], device: Any) -> tuple[Tensor, Sums]:
        """Loss of the responses' tokens that are learned; prompts are given."""
        batch = response_batch(items).to(device)
        log_probs, _ = model(batch)  # [B, T]
        total = -torch.where(batch.response_mask, log_probs, 0.0).sum()
        return total, {"loss": (total.detach(), batch.response_mask.sum())}


class PairTask(Task[Pair]):
    """A reward model: the chosen response scores higher than the rejected one.

    Bradley-Terry: -log sigmoid(chosen - rejected - margin) (arXiv:2203.02155 eq. 1; the margin
    arXiv:2307.09288 eq. 2), and where asked for `centering_coef` times the square of the sum of
    the two scores (arXiv:2312.09244 eq. 2).
    """

    name = "reward_model"
    blank = Pair(np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32))

    def __init__(self, model: Any, *, centering_coef: float) -> None:
        """A sequence classifier with one label."""
        self.module = SequenceScorer(model)
        self._centering_coef = centering_coef

    def loss(self, model: Any, items: Sequence[Pair], device: Any) -> tuple[Tensor, Sums]:
        """Loss of the pairs, and how many are in order."""
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
    """Examples as a padded batch; what only rollouts have is zero."""
    count = len(items)
    lengths = [np.ones(len(item.response_ids)) for item in items]
    learned = [
        full if item.mask is None else item.mask for item, full in zip(items, lengths, strict=True)
    ]
    mask = pad_right(lengths, torch.bool)
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
    )
