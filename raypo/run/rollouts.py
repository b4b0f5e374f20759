"""The batches of a run, from the rollout controller to the workers that train them.

The controller is in the first worker's process. The other workers only wait for what it makes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from raypo.concurrency import daemon_future, in_this_context
from raypo.config import FilterSection, OnlineConfig, PPOConfig
from raypo.metrics.clock import Clock, Span
from raypo.pending_work import at_work
from raypo.rollout.batch_scoring import Scorer, Scoring
from raypo.rollout.collect import Sampler
from raypo.rollout.controller import RolloutController
from raypo.rollout.evaluation import evaluate_policy
from raypo.rollout.sharding import deal
from raypo.rollout.step_batch import StepBatch
from raypo.run.online_inputs import OnlineInputs
from raypo.run.phases import Phase, Phases
from raypo.run.records import Records
from raypo.run.rollout_metrics import batch_metrics, sample_row
from raypo.run.run import Run
from raypo.run.services import Services
from raypo.run.weight_pusher import WeightPusher
from raypo.types import Prompt, Rollout

T = TypeVar("T")


class Rollouts:
    """Rollouts of a run, as its workers see them. All workers call every method."""

    def __init__(
        self,
        run: Run[OnlineConfig],
        records: Records,
        inputs: OnlineInputs,
        services: Services,
        phases: Phases,
        weights: WeightPusher,
        *,
        changed: Callable[[Scorer], Scorer] = lambda scorer: scorer,
    ) -> None:
        """Create the controller in the first worker's process.

        Args:
            run: The run.
            records: Its records, to which held-out samples are written.
            inputs: Its inputs.
            services: Its services, which only the controller calls, except for pushes.
            phases: Phases of the run.
            weights: Pushes of the run. A push is repeated if no engine has the weights any more.
            changed: Function that changes the scorer of the config.
        """
        self._run, self._records, self._phases, self._weights = run, records, phases, weights
        config, section = run.config, run.config.rollout
        self._is_ahead, self._settles = section.mode != "sync", section.mode == "one_step_off"
        self._controller: RolloutController | None = None
        if (own := inputs.rollouts) is None:
            return
        self._inputs = own
        self._sampler = Sampler(weights.engines, inputs.tokenizer, own.sampling)
        self._scorer = changed(own.scorer(config, services))
        new_batch = partial(
            StepBatch,
            missing_groups=config.prompts_answered,
            filter=config.ppo.filter if isinstance(config, PPOConfig) else FilterSection(),
            reward=config.reward,
        )
        self._controller = RolloutController(
            own.source,
            self._sample_and_score,
            new_batch,
            num_steps=config.num_steps,
            prompts_per_step=config.prompts_answered,
            max_staleness=section.staleness,
            is_ahead=self._is_ahead,
            overlaps=section.has_requests_in_flight,
            settles=self._settles,
        )
        run.at_end.callback(self._controller.close)

    def begin(self, *, last_step: int) -> None:
        """Start to make the batches of the steps after `last_step`, whose weights were pushed."""
        if self._controller:
            self._controller.begin(last_step=last_step)

    def take(self, step: int, clock: Clock) -> StepBatch:
        """Wait for the batch of a step.

        Args:
            step: The step.
            clock: Clock of the step. It gets the times of sampling and scoring, or the time of
                waiting if the batch was sampled ahead.

        Returns:
            The batch on the first worker, and an empty one on all others.
        """
        # After a checkpoint the learner is on its devices: all workers make room together.
        self._phases.enter(Phase.GENERATE)
        batch = self._from_first(lambda controller: controller.take(step))
        batch = batch or StepBatch()
        if self._is_ahead:
            clock.lap("time/wait_for_rollouts_s")
        else:
            clock.join(self._run.workers.broadcast(batch.clock))
            if not self._controller:
                clock.spans.clear()  # those of the first worker
        return batch

    def deal(self, batch: StepBatch, step: int, *, minibatch_size: int) -> list[Rollout]:
        """Return this worker's share of a batch, balanced by tokens (`sharding.deal`)."""
        run = self._run
        shares = deal(
            batch.trained,
            minibatch_size=minibatch_size,
            seed=(run.config.seed, step),
            num_workers=run.workers.count,
            teams=self._weights.roles.teams,
            sequence_parallel=self._weights.roles.sequence_parallel,
        )
        return run.workers.scatter(shares)

    def metrics(self, batch: StepBatch, step: int) -> dict[str, float]:
        """Return metrics of a step's samples: scores, lengths, and counts by outcome."""
        metrics: dict[str, float] = {}
        if self._controller:
            counts, metrics = self._controller.accounts(batch)
            metrics |= batch_metrics(self._run, batch, counts, self._inputs.sampling, step=step)
            metrics |= self._inputs.texts.metrics(batch.scored, step=step)
        return self._run.workers.broadcast(metrics)

    def settle(self) -> dict[str, float]:
        """Wait before a push until the next batch is complete, if `rollout.mode` is one_step_off.

        Returns:
            The seconds that this took, as the metric `perf/wait_for_engines_s`.
        """
        if not self._is_ahead:
            return {}
        began = time.perf_counter()
        if self._settles:
            self._from_first(lambda controller: controller.settle(), may_push=False)
        return {"perf/wait_for_engines_s": time.perf_counter() - began}

    def arrived(self, version: int) -> None:
        """Record that the engines now hold this version of the weights."""
        if self._controller:
            self._controller.arrived(version)

    def evaluate_initial(self) -> None:
        """Evaluate the initial policy in a new run; the first step reports its score."""
        if self._records.last_step == 0 and self._run.config.eval.prompts:
            self._run.tell.phase("evaluating the policy as it is")
            metrics = self.evaluate(step=0)
            self._records.note_initial(metrics)
            score = metrics["eval/score_mean"]
            self._run.tell.message(f"before the first update: eval {score:+.3f}")

    @at_work("the evaluation", must_move=False)
    def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the policy on the held-out prompts after a step, with the engines' weights.

        There are no metrics without held-out prompts.
        """
        if not self._run.config.eval.prompts:
            return {}
        self._phases.enter(Phase.GENERATE)
        metrics, scored = self._from_first(
            lambda _: daemon_future(self._evaluate, name="raypo-evaluation")
        ) or ({}, [])
        rows = partial(list, map(sample_row, scored))
        self._records.write_samples(step, rows, held_out=True)
        return self._run.workers.broadcast(metrics)

    def spans(self) -> list[Span]:
        """Return the time spans of sampling ahead on the first worker, none on all others."""
        return self._controller.spans() if self._controller else []

    def report_unused(self) -> None:
        """Report the number of samples that were asked for ahead and are not trained."""
        if self._controller and (unused := self._controller.num_unused):
            self._run.tell.message(f"{unused} samples were asked for ahead and are not trained")

    def save(self, directory: Path) -> dict[str, Any]:
        """Write what was sampled ahead to a checkpoint; return the position in the prompts.

        Only the first worker has a position.
        """
        return self._controller.save(directory) if self._controller else {}

    def restore(self, directory: Path, state: Mapping[str, Any], *, is_own: bool) -> None:
        """Restore the position, and what was sampled ahead if the checkpoint is this run's own."""
        if self._controller:
            self._controller.load_state_dict(state)
            if is_own:
                self._controller.restore(directory)

    def _from_first(
        self, ask: Callable[[RolloutController], Future[T]], *, may_push: bool = True
    ) -> T | None:
        """Wait on all workers for an answer of the controller; push again if it needs that.

        Returns:
            The answer on the first worker, None on all others.
        """
        answer = ask(self._controller) if self._controller else None
        workers, pushes = self._run.workers, self._weights.pushes
        while True:
            is_done = answer is None or pushes.wait_for(answer, may_push=may_push)
            is_done, self._phases.now = workers.broadcast((is_done, self._phases.now))
            if is_done:
                return answer and answer.result()
            self._weights.push_again()

    def _sample_and_score(self, prompts: Sequence[Prompt], clock: Clock) -> list[Rollout]:
        """Sample responses to prompts; add their scores and reference log-probs.

        This is called once for a step's prompts, and again to replace groups that `ppo.filter`
        drops. Its thread is one of the controller's.
        """
        scoring = Scoring(self._scorer)
        with at_work("sampling", must_move=False):
            self._phases.turn(Phase.GENERATE)
            rollouts = self._sampler.sample(
                prompts,
                # Score during sampling. The engine's call, which calls it, does not enclose that.
                on_rollouts=in_this_context(scoring.add) if scoring.scores_early else None,
            )
        clock.lap("time/generate_s")
        with at_work("scoring", must_move=False):
            self._phases.turn(Phase.SCORE, before_push=not self._run.config.is_refilled)
            scored = scoring.results(rollouts)
        clock.lap("time/score_s")
        return scored

    def _evaluate(self) -> tuple[dict[str, float], list[Rollout]]:
        inputs, scorer = self._inputs, self._scorer
        if inputs.eval_function is not None:  # it replaces function, servers and judge
            scorer = replace(scorer, function=None, servers={}, judge=None)
        return evaluate_policy(
            inputs.held_out,
            self._sampler,
            inputs.eval_function,
            section=self._run.config.eval,
            scorer=scorer,
            before_scoring=partial(self._phases.turn, Phase.SCORE),
        )
