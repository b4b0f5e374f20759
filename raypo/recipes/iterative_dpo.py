"""Iterative DPO: each round samples from the current policy and pairs best with worst samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from raypo.config import IterativeDPOConfig
from raypo.learner.preference_tasks import PreferenceTask
from raypo.learner.supervised import SupervisedLearner
from raypo.models.lora import load_policy
from raypo.run.rounds_run import Place, RoundsRecipe, learnable, place, prompt_cell
from raypo.run.services import Services
from raypo.types import Pair, Rollout

Compared = tuple[Rollout, Rollout]
"""Best and worst sample of a prompt."""


class IterativeDPORecipe(RoundsRecipe[IterativeDPOConfig, Pair]):
    """Iterative DPO recipe: the policy learns to prefer a prompt's best sample to its worst."""

    def make_task(self) -> PreferenceTask:
        """Load the policy, which learns pairs as in the recipe dpo."""
        return PreferenceTask(load_policy(self.run.config.model), self.run.config.dpo)

    def select(
        self, scored: Sequence[Rollout], services: Services, step: int
    ) -> tuple[dict[Place, Pair], dict[str, float]]:
        """Pair the best sample of each prompt with its worst; also write the pairs to `pairs/`."""
        compared = best_and_worst(scored, min_gap=self.run.config.iterative_dpo.min_gap)
        self.write_table("pairs", step, {place(best): row(best, w) for best, w in compared})
        prompts = {rollout.group_index for rollout in scored}
        metrics = {
            "selection/pairs": float(len(compared)),
            "selection/prompts_without": float(len(prompts) - len(compared)),
        }
        if compared:
            gaps = [best.score - worst.score for best, worst in compared]
            metrics["selection/score_gap_mean"] = sum(gaps) / len(gaps)
        else:
            self.run.tell.message(f"round {step}: no prompt has a pair, so nothing is learned")
        return {place(best): pair_of(best, worst) for best, worst in compared}, metrics

    def prepare_items(
        self, items: dict[Place, Pair], learner: SupervisedLearner[Pair], services: Services
    ) -> dict[Place, Pair]:
        """Add the reference model's log-probs to the pairs, unless a deployment computed them."""
        if services.reference is not None or not self.run.config.dpo.needs_reference:
            return items
        task = learner.task
        assert isinstance(task, PreferenceTask)
        is_round = self.run.config.iterative_dpo.reference == "round"
        ask = learner.asked if is_round else learner.without_adapter
        references = self.computed(items, lambda pairs: ask(pairs, task.log_probs))
        return {
            where: replace(items[where], ref_log_probs=log_probs)
            for where, log_probs in references.items()
        }


def best_and_worst(scored: Sequence[Rollout], *, min_gap: float) -> list[Compared]:
    """Return the best and the worst sample of each group.

    Groups whose two scores are tied, or closer than `min_gap`, are left out. Among samples with
    equal scores the first sampled one is taken.
    """
    compared: list[Compared] = []
    score = attrgetter("score")
    for samples in learnable(scored):
        best, worst = max(samples, key=score), min(samples, key=score)
        if best.score > worst.score and best.score - worst.score >= min_gap:
            compared.append((best, worst))
    return compared


def pair_of(best: Rollout, worst: Rollout) -> Pair:
    """Return the pair to learn. Its `margin` stays 0: only the order of the scores counts."""
    known = best.ref_log_probs, worst.ref_log_probs
    return Pair(
        best.prompt_ids,
        best.response_ids,
        worst.response_ids,
        ref_log_probs=None
        if known[0] is None or known[1] is None
        else (float(known[0].sum()), float(known[1].sum())),
    )


def row(best: Rollout, worst: Rollout) -> dict[str, Any]:
    """Return a pair as a row that `data.prompts` of the recipes dpo and reward_model can read."""
    label = best.label
    return {
        "prompt": prompt_cell(best),
        "chosen": best.response,
        "rejected": worst.response,
        "label": None if label is None else str(label),
        "chosen_score": best.score,
        "rejected_score": worst.score,
        "prompt_index": best.prompt_index,
    }
