"""Learner of recipes that train on examples. The tasks are in `raypo.learner.tasks`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from raypo.collectives import Workers, as_tensor
from raypo.config import ExamplesLearnerSection, LoraSection
from raypo.data.batching import batches_by_tokens, equally_many
from raypo.learner.export import Export, adapter_export, model_export
from raypo.learner.learning_rate import learning_rate
from raypo.learner.roles import Roles
from raypo.learner.router_balance import RouterBalance
from raypo.learner.state import SkippedUpdates, StateFiles, load_worker_state, worker_state
from raypo.learner.tasks import Item, Sums, Task
from raypo.learner.trained_model import TrainedModel
from raypo.metrics.reduce import WeightedMeans
from raypo.models.lora import adapter_off
from raypo.models.packing import digest_of
from raypo.pending_work import at_work
from raypo.types import Experience

T = TypeVar("T")


class SupervisedLearner(Generic[Item]):
    """Learner on one worker. Every method is collective: all workers call it together."""

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
        """The task, with its module and loss."""
        roles = Roles.shared(workers, section.sequence_parallel)
        self._section, self._workers = section, workers
        self.data = roles.data
        """Workers among whom the items of a step are dealt."""
        self._num_steps = num_steps
        self._skipped = SkippedUpdates(section.max_skipped_updates, "learner.lr")
        self._model = TrainedModel(
            task.module, dtype=dtype, section=section, workers=workers, sequence=roles.sequence
        )

    @property
    def name(self) -> str:
        """Name of the saved model's folder in the run's folder."""
        return self.task.name

    @at_work("the update")
    def update(self, items: Sequence[Item], *, step: int) -> dict[str, float]:
        """Run one optimizer step on this worker's share of a batch.

        Args:
            items: This worker's examples.
            step: Step number, from 1; it determines the learning rate.

        Returns:
            Metrics `train/*`, reduced over workers. They do not depend on the microbatches.

        Raises:
            NonFiniteUpdateError: more than `learner.max_skipped_updates` updates in a row were
                skipped.
        """
        means = WeightedMeans()
        mine = sum(self.task.weight(item) for item in items)
        normalizer = float(self.data.sum(as_tensor(mine)))
        section = self._section
        rate = learning_rate(step, self._num_steps, highest=section.lr, section=section)
        self._model.set_learning_rate(rate)
        pieces = self._microbatches(items)
        self._before_losses(pieces)
        of_pieces = []
        coef, workers = self._section.router_aux_coef, self._workers
        balance = RouterBalance(self._model.module, coef=coef, workers=workers)
        balance.begin_update(pieces, self._loss)
        for piece in pieces:
            with balance.recorded(piece) as routing:
                total, sums = self._loss(piece)
            self._model.backward(total / normalizer + balance.loss(routing, piece))
            of_pieces.append(sums)
        applied, norm = self._model.step()
        _add(means, of_pieces, "train")
        self._skipped.count(applied)
        means.total("train/examples", len(items))
        means.total("train/tokens", sum(item.num_tokens for item in items))
        metrics = means.reduce(self.data) | {"train/learning_rate": rate}
        metrics["train/skipped_updates"] = float(not applied)
        metrics |= balance.metrics("train")
        return metrics if norm is None else metrics | {"train/grad_norm": norm}

    @torch.no_grad()
    @at_work("the held-out loss")
    def evaluate(self, items: Sequence[Item]) -> dict[str, float]:
        """Return metrics `eval/*` of held-out examples, reduced over workers."""
        means = WeightedMeans()
        pieces = self._microbatches(items)
        self._before_losses(pieces)
        _add(means, [self._loss(piece)[1] for piece in pieces], "eval")
        return means.reduce(self.data)

    def without_adapter(
        self, items: Sequence[Item], ask: Callable[[Any, Sequence[Item], Any], list[T]]
    ) -> list[T]:
        """Run `asked` with the model's adapter disabled, if it has one."""
        with adapter_off(self.task.module):
            return self.asked(items, ask)

    @torch.no_grad()
    def asked(
        self, items: Sequence[Item], ask: Callable[[Any, Sequence[Item], Any], list[T]]
    ) -> list[T]:
        """Evaluate a function of the model on this worker's items, without gradients.

        Args:
            items: This worker's examples.
            ask: Function `(model, items, device)` that returns one result per item. It is called
                for one microbatch at a time.

        Returns:
            One result per item, in the order of `items`.
        """
        answers: dict[int, T] = {}
        for indices in self._cut(items):
            piece = [items[index] for index in indices] or [self.task.blank]
            results = ask(self._model, piece, self._model.device)
            answers |= zip(indices, results, strict=False)
        return [answers[index] for index in range(len(items))]

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights under their checkpoint names; all workers iterate together."""
        return self._model.named_weights(self.task.network)

    @torch.no_grad()
    def log_probs(self, experience: Experience) -> Tensor:
        """Return log-probs of responses, [B, T] float32, zero where masked.

        Only tasks that train a policy support it.
        """
        evaluated, _ = self._model(experience.to(self._model.device))
        return torch.where(experience.response_mask, evaluated.cpu(), 0.0)

    def offload_training_state(self) -> None:
        """Offload everything except the weights, which the weight sync to the engines needs."""
        self._model.offload.training_state()

    def offload_parameters(self) -> None:
        """Offload the weights as well."""
        self._model.offload.parameters()

    def reload(self) -> None:
        """Move everything offloaded back to the device."""
        self._model.offload.reload()

    def state_files(self) -> StateFiles:
        """Return this worker's part of the state that the next update depends on, by file.

        It waits for no other worker.
        """
        model = {f"model_{self._workers.rank}.pt": self._model.state()}
        return model | worker_state(self._workers, self._skipped)

    def restore(self, directory: Path) -> None:
        """Restore the files of `state_files`, on any number of workers at any ZeRO stage."""
        load_worker_state(directory, self._workers, self._skipped)
        self._model.load(sorted(directory.glob("model_*.pt")))

    def model_export(self, tokenizer: Any) -> Export:
        """Return the export of the model as a Hugging Face folder."""
        return model_export(self._model, self.task.network, tokenizer)

    def adapter_export(self, section: LoraSection, base: str) -> Export:
        """Return the export of the model's adapter as a peft folder."""
        return adapter_export(self._model, self.task.network, section=section, base=base)

    def _microbatches(self, items: Sequence[Item]) -> list[list[Item]]:
        return [[items[index] for index in indices] for indices in self._cut(items)]

    def _cut(self, items: Sequence[Item]) -> list[list[int]]:
        """Split examples into microbatches by token budget.

        All workers get the same number of microbatches, of which some may be empty.
        """
        prompts, prompt_lengths, lengths = [], [], []
        for item in items:  # once, because an access may read images, which are not kept
            images = getattr(item, "images", None)
            prompts.append(item.prompt_ids.tobytes() + digest_of([images], 0))
            prompt_lengths.append(len(item.prompt_ids))
            lengths.append(item.num_tokens - len(item.prompt_ids))
        budget = self._section.pass_tokens
        pieces = batches_by_tokens(
            prompts, prompt_lengths, lengths, budget, is_packed=self._model.is_packed
        )
        return equally_many(pieces, self.data)

    def _before_losses(self, pieces: list[list[Item]]) -> None:
        self.task.before_losses(self._model, pieces, self.data, self._model.device)

    def _loss(self, piece: list[Item]) -> tuple[Tensor, Sums]:
        """Return the summed loss and the metrics of a microbatch.

        An empty microbatch runs the task's placeholder with weight 0, because all workers must
        gather ZeRO-3 shards together.
        """
        total, sums = self.task.loss(self._model, piece or [self.task.blank], self._model.device)
        return (total, sums) if piece else (total * 0.0, {})


def _add(means: WeightedMeans, of_pieces: Sequence[Sums], prefix: str) -> None:
    """Add the metrics of all microbatches.

    Reading a metric blocks, so this is called after all passes are queued.
    """
    for sums in of_pieces:
        for name, (total, weight) in sums.items():
            means.add(f"{prefix}/{name}", total, weight)
