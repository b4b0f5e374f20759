"""Shared code of the recipes that train in rounds, except their loop (`raypo.recipes.rounds`).

These recipes are rejection sampling, iterative DPO and distillation.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Generic, TypeVar

from raypo.config import RoundsConfig
from raypo.learner.learner import minibatch_order
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import Item, Task
from raypo.rollout.batch_scoring import Scorer
from raypo.rollout.collect import is_trainable
from raypo.run.examples_run import even_shares, lengths
from raypo.run.online_inputs import OnlineInputs
from raypo.run.run import Run
from raypo.run.services import Services
from raypo.storage.parquet import to_parquet
from raypo.types import Rollout

T = TypeVar("T")
AnyRounds = TypeVar("AnyRounds", bound=RoundsConfig)
Place = tuple[int, int]
"""Key of a sample, by which items are ordered: group index and sample index."""
SUMMED = ("train/examples", "train/tokens", "train/skipped_updates")


class RoundsRecipe(ABC, Generic[AnyRounds, Item]):
    """Base class of a recipe that trains on the samples of each round.

    All workers call every method, unless it says otherwise.
    """

    def __init__(self, run: Run[AnyRounds], inputs: OnlineInputs) -> None:
        """Store the run and its inputs."""
        self.run, self.inputs = run, inputs

    @abstractmethod
    def make_task(self) -> Task[Item]:
        """Load the model and wrap it in its task. The caller has seeded torch's random state."""

    @abstractmethod
    def select(
        self, scored: Sequence[Rollout], services: Services, step: int
    ) -> tuple[dict[Place, Item], dict[str, float]]:
        """Make the items to train on from a round's samples. Only the first worker calls it.

        Returns:
            The items by key, and metrics.
        """

    def prepare_items(
        self,
        items: dict[Place, Item],
        learner: SupervisedLearner[Item],
        services: Services,
    ) -> dict[Place, Item]:
        """Add values that the learner computes before the update. By default items are unchanged.

        Args:
            items: The items on the first worker, none on all others.
            learner: The learner, before the round's first update.
            services: The deployments.

        Returns:
            The prepared items on the first worker, none on all others.
        """
        return items

    def scorer(self, scorer: Scorer) -> Scorer:
        """Return the scorer of a round's samples. Each model gets all samples in one call."""
        return replace(scorer, models_apart=False)

    def described(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return those metrics of a round's samples that this recipe reports."""
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the recipe's state besides prompts and learner. By default there is none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def write_table(self, folder: str, step: int, rows: Mapping[Place, dict[str, Any]]) -> None:
        """Write rows to `<folder>/round_00001.parquet`, ordered by their keys."""
        import pyarrow as pa

        table = pa.Table.from_pylist([row for _, row in sorted(rows.items())])
        self.run.files.write(f"{folder}/round_{step:05d}.parquet", to_parquet(table))

    def selected(
        self, scored: Sequence[Rollout], services: Services, step: int
    ) -> tuple[dict[Place, Item], dict[str, float]]:
        """Return the items to train on, on the first worker, and metrics on all workers."""
        items: dict[Place, Item] = {}
        metrics: dict[str, float] = {}
        if self.run.workers.rank == 0:
            items, metrics = self.select(scored, services, step)
        return items, self.run.workers.broadcast(metrics)

    def train(
        self,
        learner: SupervisedLearner[Item],
        services: Services,
        selected: dict[Place, Item],
        step: int,
    ) -> dict[str, float]:
        """Train `learner.num_epochs` epochs on the selected items.

        Args:
            learner: The learner.
            services: The deployments.
            selected: The items on the first worker, none on all others.
            step: Number of the round.

        Returns:
            Metrics of the round: sums of counts, and means of all other metrics over the updates.
        """
        workers, section = self.run.workers, self.run.config.learner
        prepared = self.prepare_items(selected, learner, services)
        places = sorted(prepared)
        hands: list[list[list[Item]]] = [[] for _ in range(workers.count)]  # [worker][update]
        for epoch in range(section.num_epochs):
            drawn = minibatch_order(self.run.config.seed, step, epoch, len(places))
            order = [prepared[places[index]] for index in drawn]
            for first in range(0, len(order), section.batch_size):
                batch = order[first : first + section.batch_size]
                shares = even_shares([lengths(item) for item in batch], workers.count)
                for hand, share in zip(hands, shares, strict=True):
                    hand.append([batch[position] for position in share])
        updates = [learner.update(batch, step=step) for batch in workers.scatter(hands)]
        names = dict.fromkeys(name for metrics in updates for name in metrics)
        values = {name: [each[name] for each in updates if name in each] for name in names}
        return {"train/updates": float(len(updates))} | {
            name: math.fsum(of_name) / (1 if name in SUMMED else len(of_name))
            for name, of_name in values.items()
        }

    def computed(
        self, items: Mapping[Place, Any], compute: Callable[[list[Any]], list[T]]
    ) -> dict[Place, T]:
        """Let all workers compute something of about as many items each.

        Args:
            items: The items on the first worker, none on all others.
            compute: Function of this worker's items, which returns a value for each.

        Returns:
            The values on the first worker, none on all others.
        """
        workers = self.run.workers
        pairs = sorted(items.items(), key=lambda pair: pair[0])
        mine = workers.scatter([pairs[rank :: workers.count] for rank in range(workers.count)])
        values = compute([item for _, item in mine])
        shares = workers.gather_first(
            {where: value for (where, _), value in zip(mine, values, strict=True)}
        )
        return {where: value for share in shares for where, value in share.items()}


def place(scored: Rollout) -> Place:
    """Return the key of a sample."""
    return scored.group_index, scored.sample_index


def learnable(scored: Sequence[Rollout]) -> list[list[Rollout]]:
    """Return the trainable samples of each group, in the order of sampling."""
    usable = sorted(filter(is_trainable, scored), key=place)
    return [list(group) for _, group in groupby(usable, lambda s: s.group_index)]


def prompt_cell(rollout: Rollout) -> str:
    """Return the prompt as it was given: a text, or chat messages as JSON."""
    return json.dumps(rollout.messages) if rollout.messages else rollout.prompt
