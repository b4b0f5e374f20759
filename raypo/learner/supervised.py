"""The learner of recipes that learn from examples; the tasks are in `raypo.learner.tasks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from raypo.collectives import Workers, as_tensor
from raypo.config import ExamplesLearnerSection, LoraSection
from raypo.data.batching import batches_by_tokens, equally_many
from raypo.learner.export import save_adapter, save_folder
from raypo.learner.learning_rate import learning_rate
from raypo.learner.state import SkippedUpdates, load_worker_state, save_worker_state
from raypo.learner.tasks import Item, Sums, Task
from raypo.learner.trained_model import TrainedModel
from raypo.metrics.reduce import WeightedMeans
from raypo.models.lora import adapter_off
from raypo.types import Experience

T = TypeVar("T")


class SupervisedLearner(Generic[Item]):
    """One worker's part; every method is called by all workers together."""

    def __init__(
        self,
        task: Task[Item],
        section: ExamplesLearnerSection,
        *,
        dtype: str,
        num_steps: int,
        workers: Workers,
    ) -> None:
        self.task = task
        """What is learned."""
        self._section, self._workers = section, workers
        self._num_steps = num_steps
        self._skipped = SkippedUpdates(section.max_skipped_updates, "learner.lr")
        self._model = TrainedModel(task.module, dtype=dtype, section=section, workers=workers)

    @property
    def name(self) -> str:
        """Folder of the saved model in the run's folder."""
        return self.task.name

    def update(self, items: Sequence[Item], *, step: int) -> dict[str, float]:
        """One optimizer step on this worker's share of a batch.

        Args:
            step: Counted from 1; it decides the learning rate.

        Returns:
            `train/*`, reduced over workers; they do not depend on how the batch was cut.

        Raises:
            NonFiniteUpdateError: more than `learner.max_skipped_updates` updates in a row were
                skipped.
        """
        means = WeightedMeans()
        mine = sum(self.task.weight(item) for item in items)
        normalizer = float(self._workers.sum(as_tensor(mine)))
        section = self._section
        rate = learning_rate(step, self._num_steps, highest=section.lr, section=section)
        self._model.set_learning_rate(rate)
        pieces = self._microbatches(items)
        self._before_losses(pieces)
        told = []
        for piece in pieces:
            total, sums = self._loss(piece)
            self._model.backward(total / normalizer)
            told.append(sums)
        applied, norm = self._model.step()
        _add(means, told, "train")
        self._skipped.count(applied)
        means.total("train/examples", len(items))
        means.total("train/tokens", sum(item.num_tokens for item in items))
        metrics = means.reduce(self._workers) | {"train/learning_rate": rate}
        metrics["train/skipped_updates"] = float(not applied)
        return metrics if norm is None else metrics | {"train/grad_norm": norm}

    @torch.no_grad()
    def evaluate(self, items: Sequence[Item]) -> dict[str, float]:
        """`eval/*` of this worker's share of the held-out examples, reduced over workers."""
        means = WeightedMeans()
        pieces = self._microbatches(items)
        self._before_losses(pieces)
        _add(means, [self._loss(piece)[1] for piece in pieces], "eval")
        return means.reduce(self._workers)

    def without_adapter(
        self, items: Sequence[Item], ask: Callable[[Any, Sequence[Item], Any], list[T]]
    ) -> list[T]:
        """As `asked`, with the model's adapter off where it has one."""
        with adapter_off(self.task.module):
            return self.asked(items, ask)

    @torch.no_grad()
    def asked(
        self, items: Sequence[Item], ask: Callable[[Any, Sequence[Item], Any], list[T]]
    ) -> list[T]:
        """What the model says of this worker's items.

        Args:
            ask: Gets the model, some of the items and its device; returns an answer to each.
        """
        answers: dict[int, T] = {}
        for places in self._cut(items):
            piece = [items[place] for place in places] or [self.task.blank]
            told = ask(self._model, piece, self._model.device)
            answers |= zip(places, told, strict=False)
        return [answers[place] for place in range(len(items))]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under their checkpoint names; all workers iterate together."""
        return self._model.named_weights(self.task.network)

    @torch.no_grad()
    def log_probs(self, experience: Experience) -> Tensor:
        """Log-probs of responses, [B, T] float32, zero where masked; of an `sft` learner."""
        evaluated, _ = self._model(experience.to(self._model.device))
        return torch.where(experience.response_mask, evaluated.cpu(), 0.0)

    def offload_training_state(self) -> None:
        """Move all that a push does not need to the host: the weights stay."""
        self._model.offload.training_state()

    def offload_parameters(self) -> None:
        """Move the weights to the host too."""
        self._model.offload.parameters()

    def reload(self) -> None:
        """Bring back what was moved to the host."""
        self._model.offload.reload()

    def save(self, directory: Path) -> None:
        """Everything that the next update depends on, this worker's part of it."""
        self._model.save(directory / "model")
        save_worker_state(directory, self._workers, self._section, self._skipped)

    def restore(self, directory: Path) -> None:
        """What `save` wrote.

        Raises:
            ValueError: it was written by another number of workers or another ZeRO stage.
        """
        load_worker_state(directory, self._workers, self._section, self._skipped)
        self._model.load(directory / "model")

    def save_model(self, folder: Path, tokenizer: Any) -> None:
        """The model as a Hugging Face folder; written by rank 0, all workers call it."""
        network = self.task.network
        save_folder(self._model, network, folder, tokenizer=tokenizer, workers=self._workers)

    def save_adapter(self, folder: Path, section: LoraSection, base: str) -> None:
        """The model's adapter as a peft folder; written by rank 0, all workers call it."""
        save_adapter(
            self._model,
            self.task.network,
            folder,
            section=section,
            base=base,
            workers=self._workers,
        )

    def _microbatches(self, items: Sequence[Item]) -> list[list[Item]]:
        return [[items[place] for place in places] for places in self._cut(items)]

    def _cut(self, items: Sequence[Item]) -> list[list[int]]:
        """Examples cut by token budget; every worker gets as many pieces, some of them empty."""
        prompts = [item.prompt_ids.tobytes() for item in items]
        prompt_lengths = [len(item.prompt_ids) for item in items]
        lengths = [item.num_tokens - len(item.prompt_ids) for item in items]
        budget = self._section.microbatch_tokens
        pieces = batches_by_tokens(
            prompts, prompt_lengths, lengths, budget, is_packed=self._model.is_packed
        )
        return equally_many(pieces, self._workers)

    def _before_losses(self, pieces: list[list[Item]]) -> None:
        self.task.before_losses(self._model, pieces, self._workers, self._model.device)

    def _loss(self, piece: list[Item]) -> tuple[Tensor, Sums]:
        """Summed loss and metrics; for no examples a pass that weighs nothing (ZeRO-3 gathers)."""
        total, sums = self.task.loss(self._model, piece or [self.task.blank], self._model.device)
        return (total, sums) if piece else (total * 0.0, {})


def _add(means: WeightedMeans, of_pieces: Sequence[Sums], prefix: str) -> None:
    """Add what the pieces give, once all passes are queued: each figure is read from the device."""
    for sums in of_pieces:
        for name, (total, weight) in sums.items():
            means.add(f"{prefix}/{name}", total, weight)
