"""Shared code of the recipes that train in rounds, except their loop (`raypo.recipes.rounds`).

These recipes are rejection sampling, iterative DPO and distillation.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Generic, TypeVar

from raypo.collectives import Workers, as_tensor
from raypo.config import RoundsConfig
from raypo.learner.learner import minibatch_order
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import Item, Task
from raypo.rollout.batch_scoring import Scorer
from raypo.rollout.collect import is_trainable
from raypo.run.examples_run import even_shares, lengths
from raypo.run.online_inputs import OnlineInputs
from raypo.run.rollout_metrics import rollout_metrics
from raypo.run.run import Run
from raypo.run.services import Services
from raypo.storage.parquet import to_parquet
from raypo.types import Rollout

AnyRounds = TypeVar("AnyRounds", bound=RoundsConfig)
Place = tuple[int, int]
"""Key of a sample: group index and sample index. All workers order items by it."""
SUMMED = ("train/examples", "train/tokens", "train/skipped_updates")


class RoundsRecipe(ABC, Generic[AnyRounds, Item]):
    """Base class of a recipe that trains on the samples of each round.

    All workers call every method.
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
        """Make the items to train on from this worker's samples.

        Returns:
            The items by key, and metrics over all workers.
        """

    def prepare_items(
        self,
        mine: Mapping[Place, Item],
        places: Sequence[Place],
        learner: SupervisedLearner[Item],
        services: Services,
    ) -> Mapping[Place, Item]:
        """Add values that the learner computes before the update. By default items are unchanged.

        Args:
            mine: The items that this worker holds.
            places: Keys of all workers' items, in order.
            learner: The learner, before the round's first update.
            services: The deployments.

        Returns:
            The prepared items that this worker now holds. Their keys may differ from those of
            `mine`.
        """
        return mine

    @property
    def prompts_per_round(self) -> int:
        """Number of prompts that the policy answers in each round, over all workers."""
        return self.run.config.rollout.prompts_per_step

    def scorer(self, services: Services) -> Scorer:
        """Return the scorer of a round's samples. Each model gets all samples in one call."""
        return replace(self.inputs.scorer(self.run.config, services), models_apart=False)

    def describe(self, scored: list[Rollout]) -> dict[str, float]:
        """Return metrics of the scores and lengths of all workers' rollouts."""
        return rollout_metrics(scored, self.run.workers) | {
            "rollout/samples_sampled": float(self.run.workers.sum(as_tensor(len(scored))))
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the recipe's state besides prompts and learner. By default there is none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def write_table(self, folder: str, step: int, mine: Mapping[Place, dict[str, Any]]) -> None:
        """Write all workers' rows to `<folder>/round_00001.parquet`, ordered by their keys."""
        shares = self.run.workers.gather_first(dict(mine))
        if self.run.workers.rank > 0:
            return
        import pyarrow as pa

        rows = sorted(pair for share in shares for pair in share.items())
        table = pa.Table.from_pylist([row for _, row in rows])
        self.run.files.write(f"{folder}/round_{step:05d}.parquet", to_parquet(table))

    def train(
        self,
        learner: SupervisedLearner[Item],
        services: Services,
        selected: Mapping[Place, Item],
        step: int,
    ) -> dict[str, float]:
        """Train `learner.num_epochs` epochs on the selected items of all workers.

        Batches are made from the items of all workers, whichever worker selected an item. All
        workers know the lengths of all items. An item itself is sent only to the workers that
        train on it.

        Returns:
            Metrics of the round: sums of counts, and means of all other metrics over the updates.
        """
        shares = self.run.workers.gather({where: lengths(item) for where, item in selected.items()})
        sizes = dict(sorted(pair for share in shares for pair in share.items()))
        places = list(sizes)
        prepared = self.prepare_items(selected, places, learner, services)
        size, seed = self.run.config.learner.batch_size, self.run.config.seed
        rank, count = self.run.workers.rank, self.run.workers.count
        dealt: list[list[list[Place]]] = []  # [update][worker]
        for epoch in range(self.run.config.learner.num_epochs):
            order = [places[each] for each in minibatch_order(seed, step, epoch, len(places))]
            for first in range(0, len(order), size):
                batch = order[first : first + size]
                cut = even_shares([sizes[where] for where in batch], count)
                dealt.append([[batch[position] for position in share] for share in cut])
        hands = [[where for batch in dealt for where in batch[each]] for each in range(count)]
        mine = handed_out(prepared, hands, self.run.workers)
        updates = [
            learner.update([mine[where] for where in batch[rank]], step=step) for batch in dealt
        ]
        names = dict.fromkeys(name for metrics in updates for name in metrics)
        known = {name: [each[name] for each in updates if name in each] for name in names}
        return {"train/updates": float(len(updates))} | {
            name: math.fsum(values) / (1 if name in SUMMED else len(values))
            for name, values in known.items()
        }


def handed_out(
    mine: Mapping[Place, Item], hands: Sequence[Sequence[Place]], workers: Workers
) -> dict[Place, Item]:
    """Exchange items between workers, and return the items for this worker. All workers call this.

    Args:
        mine: The items that this worker holds.
        hands: Keys of the items that each worker gets, the same on all workers.
        workers: All workers.
    """
    parcels = [{where: mine[where] for where in hand if where in mine} for hand in hands]
    return {k: item for parcel in workers.exchange(parcels) for k, item in parcel.items()}


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
