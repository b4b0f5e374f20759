"""Shared part of the recipes that work in rounds: sample, score, select, then train.

These recipes are `rejection_sampling`, `iterative_dpo` and `distillation`. The `select` method of
a recipe chooses the training items from a round's samples.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Generic, TypeVar

from raypo.collectives import Workers
from raypo.config import RoundsConfig
from raypo.learner.learner import minibatch_order
from raypo.learner.roles import Roles
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import Item, Task
from raypo.metrics.clock import Clock
from raypo.rollout.batch_scoring import Scorer
from raypo.rollout.collect import is_trainable
from raypo.run.online_inputs import OnlineInputs
from raypo.run.phases import Phase, Phases
from raypo.run.records import Records
from raypo.run.rollout_metrics import sample_row
from raypo.run.rollouts import Rollouts
from raypo.run.run import Run, open_run
from raypo.run.run_checkpoints import Checkpoints
from raypo.run.services import Services, start_services
from raypo.run.steps import StepResult, run_steps
from raypo.run.supervised_learner import even_shares, lengths, new_learner, trained_models
from raypo.run.weight_pusher import WeightPusher
from raypo.storage.parquet import to_parquet
from raypo.types import Rollout

T = TypeVar("T")
AnyRounds = TypeVar("AnyRounds", bound=RoundsConfig)
SampleKey = tuple[int, int]
"""Group index and sample index of a sample. Items are ordered by them."""
SUMMED_METRICS = ("train/examples", "train/tokens", "train/skipped_updates")


class RoundsRecipe(ABC, Generic[AnyRounds, Item]):
    """Base class of a recipe that trains on the samples of each round.

    All workers call every method, unless it says otherwise.
    """

    def __init__(self, run: Run[AnyRounds], inputs: OnlineInputs, services: Services) -> None:
        """Store the parts of the run."""
        self.run, self.inputs, self.services = run, inputs, services

    @abstractmethod
    def make_task(self) -> Task[Item]:
        """Load the model and wrap it in its task. The caller has seeded torch's random state."""

    @abstractmethod
    def select(
        self, scored: Sequence[Rollout], step: int
    ) -> tuple[dict[SampleKey, Item], dict[str, float]]:
        """Select the items to train on from a round's samples. Only the first worker calls it.

        Returns:
            The items by key, and metrics.
        """

    def prepare_items(
        self, items: dict[SampleKey, Item], learner: SupervisedLearner[Item]
    ) -> dict[SampleKey, Item]:
        """Add values that the learner computes before the update. The default adds none.

        Args:
            items: The items on the first worker, empty on all others.
            learner: The learner, before the round's first update.

        Returns:
            The prepared items on the first worker, empty on all others.
        """
        return items

    def scorer(self, scorer: Scorer) -> Scorer:
        """Return the scorer of a round's samples. Each model gets all samples in one call."""
        return replace(scorer, models_apart=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the recipe's state, except prompts and learner. The default is empty."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def sample_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return a round's sample metrics, without score metrics if no reward is configured."""
        if self.inputs.has_reward_function or self.run.config.judges:
            return metrics
        score_prefixes = ("rollout/score_", "rollout/zero_variance_fraction")
        return {
            name: value for name, value in metrics.items() if not name.startswith(score_prefixes)
        }

    def write_table(self, folder: str, step: int, rows: Mapping[SampleKey, dict[str, Any]]) -> None:
        """Write rows to `<folder>/round_00001.parquet`, ordered by their keys."""
        import pyarrow as pa

        table = pa.Table.from_pylist([row for _, row in sorted(rows.items())])
        self.run.files.write(f"{folder}/round_{step:05d}.parquet", to_parquet(table))

    def train(
        self, learner: SupervisedLearner[Item], selected: dict[SampleKey, Item], step: int
    ) -> dict[str, float]:
        """Train `learner.num_epochs` epochs on the selected items.

        Args:
            learner: The learner.
            selected: The items on the first worker, empty on all others.
            step: Index of the round, from 1.

        Returns:
            Metrics of the round: sums of counts, and means of all other metrics over the updates.
        """
        workers, config = self.run.workers, self.run.config
        items = self.prepare_items(selected, learner)
        keys, batch_size = sorted(items), config.learner.batch_size
        batches: list[list[Item]] = []
        for epoch in range(config.learner.num_epochs):
            indices = minibatch_order(config.seed, step, epoch, len(keys))
            order = [items[keys[index]] for index in indices]
            batches += [
                order[start : start + batch_size] for start in range(0, len(order), batch_size)
            ]
        updates: list[dict[str, float]] = []
        for batch_index in range(workers.broadcast(len(batches))):
            batch = batches[batch_index] if batches else []  # only the first worker has the batches
            shares = even_shares([lengths(item) for item in batch], learner.data.count)
            share = _scattered([[batch[index] for index in share] for share in shares], workers)
            updates.append(learner.update(share, step=step))
        names = dict.fromkeys(name for metrics in updates for name in metrics)
        columns = {name: [row[name] for row in updates if name in row] for name in names}
        return {"train/updates": float(len(updates))} | {
            name: math.fsum(values) / (1 if name in SUMMED_METRICS else len(values))
            for name, values in columns.items()
        }

    def compute_in_parallel(
        self,
        items: Mapping[SampleKey, Item],
        learner: SupervisedLearner[Item],
        compute: Callable[[list[Item]], Sequence[T]],
    ) -> dict[SampleKey, T]:
        """Apply a function to all items, distributed evenly over the workers.

        Args:
            items: The items on the first worker, empty on all others.
            learner: The learner that computes the values.
            compute: Function that returns one value for each of this worker's items.

        Returns:
            The values on the first worker, empty on all others.
        """
        workers, count = self.run.workers, learner.data.count
        pairs = sorted(items.items(), key=lambda pair: pair[0])
        own_pairs = _scattered([pairs[rank::count] for rank in range(count)], workers)
        values = zip(own_pairs, compute([item for _, item in own_pairs]), strict=True)
        shares = workers.gather_first({key: value for (key, _), value in values})
        return {key: value for own_pairs in shares for key, value in own_pairs.items()}


def rounds_loop(
    setup: dict[str, Any], recipe_class: type[RoundsRecipe[Any, Any]]
) -> dict[str, Any]:
    """Run a recipe on one learner worker; Ray Train calls this on each of them.

    Args:
        setup: `config.model_dump()` of a RoundsConfig.
        recipe_class: Class of the recipe, which selects samples and makes the training task.

    Returns:
        `{"status": "finished" | "interrupted", "step": last completed round}`.
    """
    with open_run(setup) as run:
        config, workers = run.config, run.workers
        inputs = OnlineInputs.load(run)
        services = start_services(run)
        records = Records(run)
        recipe = recipe_class(run, inputs, services)
        phases = Phases.of(run, services)
        weights = WeightPusher(run, inputs, services, phases, Roles.shared(workers))
        rollouts = Rollouts(run, records, inputs, services, phases, weights, changed=recipe.scorer)
        phases.enter(Phase.LEARN)
        learner = phases.learner = new_learner(run, recipe.make_task)
        checkpoints = Checkpoints(
            run,
            records,
            learner,
            workers,
            trained_models(config, learner, inputs.tokenizer),
            rollouts,
            before_saving=partial(phases.enter, Phase.LEARN),
        )
        if state := checkpoints.restore():
            recipe.load_state_dict(state)
        weights.push_first(learner, version=records.last_step)
        rollouts.evaluate_initial()
        rollouts.begin(last_step=records.last_step)

        def train_round(step: int, clock: Clock) -> StepResult:
            batch = rollouts.take(step, clock)
            phases.enter(Phase.SCORE)  # `select` calls teachers, even if nothing was sampled
            selected: dict[SampleKey, Any] = {}
            metrics: dict[str, float] = {}
            if workers.rank == 0:
                selected, metrics = recipe.select(batch.scored, step)
            metrics = workers.broadcast(metrics)
            clock.lap("time/select_s")
            phases.enter(Phase.LEARN)
            metrics |= recipe.train(learner, selected, step)
            clock.lap("time/update_s")
            metrics |= recipe.sample_metrics(rollouts.metrics(batch, step))
            records.write_samples(step, partial(list, map(sample_row, batch.scored)))
            clock.lap("time/save_rollouts_s")

            metrics |= weights.push(learner, version=step)
            rollouts.arrived(step)
            clock.lap("time/push_weights_s")
            return StepResult(metrics, recipe.state_dict(), samples=batch.scored)

        run_steps(run, records, checkpoints, train_round, rollouts.evaluate)
        return records.finish()


def _scattered(shares: Sequence[list[T]], workers: Workers) -> list[T]:
    """Return this worker's share of those of the first worker.

    There may be fewer shares than workers. Neighbours, a sequence group, then get the same one.
    """
    size = workers.count // len(shares)
    return workers.scatter([shares[rank // size] for rank in range(workers.count)])


def key_of(sample: Rollout) -> SampleKey:
    """Return the key of a sample."""
    return sample.group_index, sample.sample_index


def trainable_groups(scored: Sequence[Rollout]) -> list[list[Rollout]]:
    """Return the trainable samples of each group, in the order of sampling."""
    trainable = sorted(filter(is_trainable, scored), key=key_of)
    return [list(group) for _, group in groupby(trainable, lambda sample: sample.group_index)]


def prompt_cell(rollout: Rollout) -> str:
    """Return the prompt as in the data: a text, or chat messages as JSON."""
    return json.dumps(rollout.messages) if rollout.messages else rollout.prompt
