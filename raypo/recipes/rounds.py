"""Shared part of the recipes that work in rounds: sample, score, select, then train.

These recipes are `rejection_sampling`, `iterative_dpo` and `distillation`. The `select` method of
each recipe chooses what is learned from a round's samples.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any, Generic, TypeVar

from raypo.collectives import Workers, as_tensor
from raypo.config import RoundsConfig
from raypo.learner.learner import minibatch_order
from raypo.learner.roles import Roles
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import Item, Task
from raypo.metrics.clock import Clock
from raypo.rollout.collect import is_trainable, refuse_too_many_failures
from raypo.run.online_inputs import OnlineInputs
from raypo.run.phases import Phase, Phases
from raypo.run.policy_evaluation import Evaluation
from raypo.run.records import Records
from raypo.run.rollout_metrics import rollout_metrics, sample_row
from raypo.run.run import Run, open_run
from raypo.run.run_checkpoints import Checkpoints
from raypo.run.services import Services, start_services
from raypo.run.steps import StepResult, run_steps
from raypo.run.supervised_learner import even_shares, lengths, new_learner, trained_models
from raypo.run.weight_pusher import WeightPusher
from raypo.storage.parquet import to_parquet
from raypo.types import Rollout

AnyRounds = TypeVar("AnyRounds", bound=RoundsConfig)
SampleKey = tuple[int, int]
"""Group index and sample index of a sample. All workers order items by it."""
SUMMED = ("train/examples", "train/tokens", "train/skipped_updates")


class RoundsRecipe(ABC, Generic[AnyRounds, Item]):
    """Base class of a recipe that trains on the samples of each round.

    All workers call every method.
    """

    def __init__(self, run: Run[AnyRounds], inputs: OnlineInputs, services: Services) -> None:
        """Store the parts of the run, and make the scorer of a round's samples."""
        self.run, self.inputs, self.services = run, inputs, services
        self.prompts_per_round = run.config.rollout.prompts_per_step
        """Number of prompts that the policy answers in each round, over all workers."""
        # Each model gets all samples of a round in one call.
        self.scorer = replace(inputs.scorer(run.config, services), models_apart=False)

    @abstractmethod
    def make_task(self) -> Task[Item]:
        """Load the model and wrap it in its task. The caller has seeded torch's random state."""

    @abstractmethod
    def select(
        self, scored: Sequence[Rollout], step: int
    ) -> tuple[dict[SampleKey, Item], dict[str, float]]:
        """Make the items to train on from this worker's samples.

        Returns:
            The items by key, and metrics over all workers.
        """

    def prepare_items(
        self,
        items: Mapping[SampleKey, Item],
        keys: Sequence[SampleKey],
        learner: SupervisedLearner[Item],
    ) -> Mapping[SampleKey, Item]:
        """Add values that the learner computes before the update. By default items are unchanged.

        Args:
            items: The items that this worker holds.
            keys: Keys of all workers' items, in order.
            learner: The learner, before the round's first update.

        Returns:
            The prepared items that this worker now holds. Their keys may differ from those of
            `items`.
        """
        return items

    def state_dict(self) -> dict[str, Any]:
        """Return the recipe's state besides prompts and learner. By default there is none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def describe(self, scored: list[Rollout]) -> dict[str, float]:
        """Return metrics of all workers' rollouts, without scores if no reward is configured."""
        metrics = rollout_metrics(scored, self.run.workers)
        if not (self.inputs.reward_function or self.run.config.judges):
            of_scores = ("rollout/score_", "rollout/zero_variance_fraction")
            metrics = {k: value for k, value in metrics.items() if not k.startswith(of_scores)}
        count = float(self.run.workers.sum(as_tensor(len(scored))))
        return metrics | {"rollout/samples_sampled": count}

    def write_table(self, folder: str, step: int, rows: Mapping[SampleKey, dict[str, Any]]) -> None:
        """Write all workers' rows to `<folder>/round_00001.parquet`, ordered by their keys."""
        shares = self.run.workers.gather_first(dict(rows))
        if self.run.workers.rank > 0:
            return
        import pyarrow as pa

        ordered = sorted(pair for share in shares for pair in share.items())
        table = pa.Table.from_pylist([row for _, row in ordered])
        self.run.files.write(f"{folder}/round_{step:05d}.parquet", to_parquet(table))

    def train(
        self, learner: SupervisedLearner[Item], selected: Mapping[SampleKey, Item], step: int
    ) -> dict[str, float]:
        """Train `learner.num_epochs` epochs on the selected items of all workers.

        Batches are made from the items of all workers, whichever worker selected an item. All
        workers know the lengths of all items. An item itself is sent only to the workers that
        train on it.

        Returns:
            Metrics of the round: sums of counts, and means of all other metrics over the updates.
        """
        workers, config = self.run.workers, self.run.config
        shares = workers.gather({key: lengths(item) for key, item in selected.items()})
        sizes = dict(sorted(pair for share in shares for pair in share.items()))
        keys = list(sizes)
        prepared = self.prepare_items(selected, keys, learner)
        size = config.learner.batch_size
        batches: list[list[list[SampleKey]]] = []  # [update][worker]
        for epoch in range(config.learner.num_epochs):
            order = [keys[n] for n in minibatch_order(config.seed, step, epoch, len(keys))]
            for first in range(0, len(order), size):
                batch = order[first : first + size]
                indices = even_shares([sizes[key] for key in batch], workers.count)
                batches.append([[batch[index] for index in share] for share in indices])
        keys_of_workers = [
            [key for batch in batches for key in batch[rank]] for rank in range(workers.count)
        ]
        items = exchange_items(prepared, keys_of_workers, workers)
        updates = [
            learner.update([items[key] for key in batch[workers.rank]], step=step)
            for batch in batches
        ]
        names = dict.fromkeys(name for metrics in updates for name in metrics)
        columns = {name: [row[name] for row in updates if name in row] for name in names}
        return {"train/updates": float(len(updates))} | {
            name: math.fsum(values) / (1 if name in SUMMED else len(values))
            for name, values in columns.items()
        }


def rounds_loop(setup: dict[str, Any], kind: type[RoundsRecipe[Any, Any]]) -> dict[str, Any]:
    """Run a recipe on one learner worker; Ray Train calls this on each of them.

    Args:
        setup: `config.model_dump()` of a RoundsConfig.
        kind: Class of the recipe, which selects samples and makes the training task.

    Returns:
        `{"status": "finished" | "interrupted", "step": last completed round}`.
    """
    with open_run(setup) as run:
        config, workers = run.config, run.workers
        inputs = OnlineInputs.load(run)
        services = start_services(run)
        records = Records(run)
        recipe = kind(run, inputs, services)
        phases = Phases.of(run, services)
        weights = WeightPusher(run, inputs, services, phases, Roles.shared(workers))
        sampler = weights.sampler()
        phases.enter(Phase.LEARN)
        learner = phases.learner = new_learner(run, recipe.make_task)
        checkpoints = Checkpoints(
            run,
            records,
            learner,
            workers,
            trained_models(config, learner, inputs.tokenizer),
            inputs.source,
            before_saving=partial(phases.enter, Phase.LEARN),
        )
        if saved := checkpoints.restore():
            recipe.load_state_dict(saved)
        weights.push_first(learner, version=records.last_step)
        evaluation = Evaluation(run, inputs, sampler, recipe.scorer, phases, records)
        evaluation.before_first_update()

        def train_round(step: int, clock: Clock) -> StepResult:
            phases.enter(Phase.GENERATE)
            prompts = inputs.source.draw(recipe.prompts_per_round, workers)
            rollouts = sampler.sample(prompts, workers)
            clock.lap("time/generate_s")
            phases.enter(Phase.SCORE, before_push=True)
            scored = recipe.scorer.score(rollouts)
            refuse_too_many_failures(scored, config.reward, workers)
            clock.lap("time/score_s")

            selected, metrics = recipe.select(scored, step)
            clock.lap("time/select_s")
            phases.enter(Phase.LEARN)
            metrics |= recipe.train(learner, selected, step)
            clock.lap("time/update_s")
            metrics |= recipe.describe(scored)
            records.write_samples(step, partial(list, map(sample_row, scored)))
            clock.lap("time/save_rollouts_s")

            metrics |= weights.push(learner, version=step)
            clock.lap("time/push_weights_s")
            return StepResult(metrics, recipe.state_dict(), samples=scored)

        run_steps(run, records, checkpoints, train_round, evaluation.metrics)
        return records.finish()


def exchange_items(
    items: Mapping[SampleKey, Item], keys: Sequence[Sequence[SampleKey]], workers: Workers
) -> dict[SampleKey, Item]:
    """Exchange items between workers, and return the items for this worker. All workers call this.

    Args:
        items: The items that this worker holds.
        keys: Keys of the items that each worker gets, the same on all workers.
        workers: All workers.

    Returns:
        This worker's items, in the order of its keys.
    """
    parcels = [{key: items[key] for key in of_worker if key in items} for of_worker in keys]
    received = {k: item for parcel in workers.exchange(parcels) for k, item in parcel.items()}
    return {key: received[key] for key in keys[workers.rank]}


def exchange_evenly(
    items: Mapping[SampleKey, Item], keys: Sequence[SampleKey], workers: Workers
) -> dict[SampleKey, Item]:
    """Exchange items so that each worker holds about as many. All workers call this.

    Args:
        items: The items that this worker holds.
        keys: Keys of all workers' items, in order.
        workers: All workers.
    """
    shares = [keys[rank :: workers.count] for rank in range(workers.count)]
    return exchange_items(items, shares, workers)


def key_of(sample: Rollout) -> SampleKey:
    """Return the key of a sample."""
    return sample.group_index, sample.sample_index


def trainable_groups(scored: Sequence[Rollout]) -> list[list[Rollout]]:
    """Return the trainable samples of each group, in the order of sampling."""
    usable = sorted(filter(is_trainable, scored), key=key_of)
    return [list(group) for _, group in groupby(usable, lambda sample: sample.group_index)]


def prompt_cell(rollout: Rollout) -> str:
    """Return the prompt as it was given: a text, or chat messages as JSON."""
    return json.dumps(rollout.messages) if rollout.messages else rollout.prompt
