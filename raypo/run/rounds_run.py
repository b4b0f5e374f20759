"""Training loop and shared code of the recipes that work in rounds: sample, select, then train.

These are rejection sampling, iterative DPO and distillation.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, Generic, TypeVar

from raypo.collectives import Workers, as_tensor
from raypo.config import RoundsConfig
from raypo.learner.learner import minibatch_order
from raypo.learner.supervised import SupervisedLearner
from raypo.learner.tasks import Item, Task
from raypo.metrics.clock import Clock
from raypo.rollout.batch_scoring import Reference, Scoring
from raypo.rollout.collect import is_trainable, next_draws, refuse_too_many_failures, sample
from raypo.run.examples_run import even_shares, lengths, new_learner, save_trained
from raypo.run.online_run import OnlineRun
from raypo.run.phases import Phase
from raypo.run.rollout_metrics import rollout_metrics, sample_row
from raypo.run.run import open_run
from raypo.run.services import Services
from raypo.storage.parquet import to_parquet
from raypo.types import ScoredRollout

AnyRounds = TypeVar("AnyRounds", bound=RoundsConfig)
Place = tuple[int, int]
"""Key of a sample: group index and sample index. It fixes one order of items on all workers."""
SUMMED = ("train/examples", "train/tokens", "train/skipped_updates")


def rounds_loop(setup: dict[str, Any], kind: type[RoundsRun[Any, Any]]) -> dict[str, Any]:
    """Run a recipe on one learner worker; Ray Train calls this on each of them.

    Args:
        setup: `config.model_dump()` of a RoundsConfig.
        kind: The recipe's class, which selects samples and makes the learning task.

    Returns:
        `{"status": "finished" | "interrupted", "step": last completed round}`.
    """
    with open_run(setup, kind) as run:
        services = run.start_services()
        learner = run.start_learner()
        run.push_weights(learner, services, version=run.last_step)
        run.evaluate_before_first_update(services)

        for step in run.steps():
            clock = Clock()
            scored = run.collect(services, clock)  # sample, score
            selected, metrics = run.select(scored, services, step)
            clock.lap("time/select_s")
            metrics |= run.train(learner, services, selected, step)
            clock.lap("time/update_s")
            metrics |= run.describe(scored)
            run.save_rollouts(step, scored)
            clock.lap("time/save_rollouts_s")

            metrics |= run.push_weights(learner, services, version=step)
            clock.lap("time/push_weights_s")

            metrics |= run.evaluate_when_due(step, services)
            clock.lap("time/held_out_s")
            checkpoint = run.checkpoint_when_due(step, learner, metrics)
            clock.lap("time/checkpoint_s")
            run.report(step, metrics, clock, checkpoint)

        return run.finish()


@dataclass
class RoundsRun(OnlineRun[AnyRounds], Generic[AnyRounds, Item]):
    """One worker's view of a run that works in rounds; all workers call every method."""

    @abstractmethod
    def make_task(self) -> Task[Item]:
        """Load the model and wrap it in its task. Torch's random state is seeded before."""

    @abstractmethod
    def select(
        self, scored: Sequence[ScoredRollout], services: Services, step: int
    ) -> tuple[dict[Place, Item], dict[str, float]]:
        """Return the items to learn from this worker's samples, and metrics over all workers."""

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
            Items for this worker. They may be other ones than `mine`.
        """
        return mine

    @property
    def prompts_per_round(self) -> int:
        """Number of prompts per round that the policy answers, over all workers."""
        return self.config.rollout.prompts_per_step

    def scoring_reference(self, services: Services) -> Reference | None:
        """Return the reference model that computes log-probs of the samples. None means none."""
        return services.reference

    def start_learner(self) -> SupervisedLearner[Item]:
        """Load the policy under DeepSpeed, restored from the last checkpoint if there is one."""
        self.enter(Phase.LEARN)
        self.tell.phase("loading the policy")
        learner = new_learner(self, self.make_task)
        assert self._phases is not None
        self._phases.learner = learner
        self.restore(learner)
        return learner

    def collect(self, services: Services, clock: Clock) -> list[ScoredRollout]:
        """Sample and score this worker's share of a round."""
        draws = next_draws(self.stream, self.prompts_per_round, self.workers)
        self.enter(Phase.GENERATE)
        rollouts = sample(
            draws,
            self.engines(services),
            self.tokenizer,
            self.sampling,
            self.push_again,
            dispatcher=self.dispatcher(services, self.workers),
        )
        clock.lap("time/generate_s")
        self.enter(Phase.SCORE, before_push=True)
        scoring = Scoring(self.reward_sources(services), self.scoring_reference(services))
        scored = scoring.results(rollouts)
        refuse_too_many_failures(scored, self.config.reward, self.workers)
        clock.lap("time/score_s")
        return scored

    def train(
        self,
        learner: SupervisedLearner[Item],
        services: Services,
        selected: Mapping[Place, Item],
        step: int,
    ) -> dict[str, float]:
        """Train `learner.num_epochs` epochs on the selected items of all workers.

        Batches are cut from all items, independent of the worker that selected them. All workers
        know the lengths of all items. An item itself is sent only to the workers that train on it.

        Returns:
            Means over the round's updates; counts are sums.
        """
        self.enter(Phase.LEARN)
        shares = self.workers.gather({where: lengths(item) for where, item in selected.items()})
        sizes = dict(sorted(pair for share in shares for pair in share.items()))
        places = list(sizes)
        prepared = self.prepare_items(selected, places, learner, services)
        size, seed = self.config.learner.batch_size, self.config.seed
        rank, count = self.workers.rank, self.workers.count
        dealt: list[list[list[Place]]] = []  # [update][worker]
        for epoch in range(self.config.learner.num_epochs):
            order = [places[each] for each in minibatch_order(seed, step, epoch, len(places))]
            for first in range(0, len(order), size):
                batch = order[first : first + size]
                cut = even_shares([sizes[where] for where in batch], count)
                dealt.append([[batch[position] for position in share] for share in cut])
        hands = [[where for batch in dealt for where in batch[each]] for each in range(count)]
        mine = handed_out(prepared, hands, self.workers)
        updates = [
            learner.update([mine[where] for where in batch[rank]], step=step) for batch in dealt
        ]
        names = dict.fromkeys(name for metrics in updates for name in metrics)
        known = {name: [each[name] for each in updates if name in each] for name in names}
        return {"train/updates": float(len(updates))} | {
            name: math.fsum(values) / (1 if name in SUMMED else len(values))
            for name, values in known.items()
        }

    def describe(self, scored: list[ScoredRollout]) -> dict[str, float]:
        """Return scores and lengths of all workers' rollouts."""
        self._sampled = scored
        return rollout_metrics(scored, self.workers) | {
            "rollout/samples_sampled": float(self.workers.sum(as_tensor(len(scored))))
        }

    def save_rollouts(self, step: int, scored: Sequence[ScoredRollout]) -> None:
        """Write all workers' samples to `rollouts/`, in the background."""
        rows = partial(list, map(sample_row, scored))
        self.write_later(partial(self._write_rollouts, step, rows))

    def write_table(self, folder: str, step: int, mine: Mapping[Place, dict[str, Any]]) -> None:
        """Write all workers' rows to `<folder>/round_00001.parquet`, ordered by their keys."""
        shares = self.workers.gather_first(dict(mine))
        if self.workers.rank > 0:
            return
        import pyarrow as pa

        rows = sorted(pair for share in shares for pair in share.items())
        table = pa.Table.from_pylist([row for _, row in rows])
        self.files.write(f"{folder}/round_{step:05d}.parquet", to_parquet(table))

    def save_models(self, learner: SupervisedLearner[Item]) -> None:
        """Write the policy to the run's `policy/`, its adapter to `adapter/`."""
        save_trained(self, learner, self.tokenizer)


def handed_out(
    mine: Mapping[Place, Item], hands: Sequence[Sequence[Place]], workers: Workers
) -> dict[Place, Item]:
    """Exchange items between workers; return those meant for this one. All workers call it.

    Args:
        mine: The items that this worker holds.
        hands: Keys of the items that each worker gets, the same on all workers.
        workers: All workers.
    """
    parcels = [{where: mine[where] for where in hand if where in mine} for hand in hands]
    return {k: item for parcel in workers.exchange(parcels) for k, item in parcel.items()}


def place(scored: ScoredRollout) -> Place:
    """Return the key of a sample."""
    return scored.rollout.group_index, scored.rollout.sample_index


def learnable(scored: Sequence[ScoredRollout]) -> list[list[ScoredRollout]]:
    """Return the trainable samples of each group, in the order of sampling."""
    usable = sorted(filter(is_trainable, scored), key=place)
    return [list(group) for _, group in groupby(usable, lambda s: s.rollout.group_index)]


def prompt_cell(scored: ScoredRollout) -> str:
    """Return the prompt as it was given: a text, or chat messages as JSON."""
    rollout = scored.rollout
    return json.dumps(rollout.messages) if rollout.messages else rollout.prompt
