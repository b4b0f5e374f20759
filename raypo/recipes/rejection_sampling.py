"""Rejection sampling: the best of several samples per prompt are saved and used for SFT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raypo.config import RejectionSamplingConfig, SelectionSection
from raypo.learner.tasks import ResponseTask
from raypo.models.lora import load_policy
from raypo.run.rounds_run import Place, RoundsRecipe, learnable, place, prompt_cell
from raypo.run.services import Services
from raypo.types import Example, Rollout


class RejectionSamplingRecipe(RoundsRecipe[RejectionSamplingConfig, Example]):
    """Rejection-sampling recipe: the policy learns the best samples of each prompt."""

    def make_task(self) -> ResponseTask:
        """Load the policy, which learns responses as in supervised fine-tuning."""
        return ResponseTask(load_policy(self.run.config.model))

    def select(
        self, scored: Sequence[Rollout], services: Services, step: int
    ) -> tuple[dict[Place, Example], dict[str, float]]:
        """Select the best samples of each prompt; also write them to `selected/`."""
        section = self.run.config.rejection_sampling
        kept = best_of(scored, section)
        self.write_table("selected", step, {place(each): row(each) for each in kept})
        groups = {rollout.group_index for rollout in scored}
        with_some = {rollout.group_index for rollout in kept}
        metrics = {
            "selection/responses": float(len(kept)),
            "selection/prompts_without": float(len(groups - with_some)),
        }
        if kept:
            metrics["selection/score_mean"] = sum(rollout.score for rollout in kept) / len(kept)
        else:
            self.run.tell.message(
                f"round {step}: no response is good enough, so nothing is learned"
            )
        if not section.train:
            return {}, metrics
        return {place(each): Example(each.prompt_ids, each.response_ids) for each in kept}, metrics


def best_of(scored: Sequence[Rollout], section: SelectionSection) -> list[Rollout]:
    """Return the best samples of each group; among equal scores the first sampled ones win."""
    kept: list[Rollout] = []
    for group in learnable(scored):
        best = sorted(group, key=lambda each: -each.score)
        if section.min_score is not None:
            best = [each for each in best if each.score >= section.min_score]
        if section.distinct:
            # A dict keeps the last of equal keys. In reverse order, that is the best and first
            # sampled one of equal responses.
            best = list({each.response_ids.tobytes(): each for each in best[::-1]}.values())
            best.sort(key=lambda each: (-each.score, each.sample_index))
        kept += best[: section.top_k]
    return kept


def row(scored: Rollout) -> dict[str, Any]:
    """Return a response as a row that `data.prompts` of the recipe sft can read."""
    return {
        "prompt": prompt_cell(scored),
        "response": scored.response,
        "label": None if scored.label is None else str(scored.label),
        "score": scored.score,
        "finish_reason": scored.finish_reason,
        "prompt_index": scored.prompt_index,
    }
