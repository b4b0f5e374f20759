"""Rejection sampling: the best of several samples per prompt are saved and used for SFT."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raypo.config import RejectionSamplingConfig, SelectionSection
from raypo.learner.tasks import ResponseTask
from raypo.models.lora import load_policy
from raypo.recipes.rounds import (
    RoundsRecipe,
    SampleKey,
    key_of,
    prompt_cell,
    rounds_loop,
    trainable_groups,
)
from raypo.types import Example, Rollout


def train_loop_per_worker(setup: dict[str, Any]) -> dict[str, Any]:
    """Run rejection sampling on one learner worker; Ray Train calls this on each of them."""
    return rounds_loop(setup, RejectionSamplingRecipe)


class RejectionSamplingRecipe(RoundsRecipe[RejectionSamplingConfig, Example]):
    """Rejection-sampling recipe: the policy learns the best samples of each prompt."""

    def make_task(self) -> ResponseTask:
        """Load the policy, which learns responses as in supervised fine-tuning."""
        return ResponseTask(load_policy(self.run.config.model))

    def select(
        self, scored: Sequence[Rollout], step: int
    ) -> tuple[dict[SampleKey, Example], dict[str, float]]:
        """Select the best samples of each prompt; also write them to `selected/`."""
        section = self.run.config.rejection_sampling
        best = best_of(scored, section)
        self.write_table("selected", step, {key_of(sample): row_of(sample) for sample in best})
        groups = {sample.group_index for sample in scored}
        selected_groups = {sample.group_index for sample in best}
        metrics = {
            "selection/responses": float(len(best)),
            "selection/prompts_without": float(len(groups - selected_groups)),
        }
        if best:
            metrics["selection/score_mean"] = sum(sample.score for sample in best) / len(best)
        else:
            self.run.tell.message(
                f"round {step}: no response is good enough, so nothing is learned"
            )
        if not section.train:
            return {}, metrics
        examples = (Example(s.prompt_ids, s.response_ids, images=s.images) for s in best)
        return dict(zip(map(key_of, best), examples, strict=True)), metrics


def best_of(scored: Sequence[Rollout], section: SelectionSection) -> list[Rollout]:
    """Return the best samples of each group; among equal scores the first sampled ones win."""
    selected: list[Rollout] = []
    for group in trainable_groups(scored):
        best = sorted(group, key=lambda sample: -sample.score)
        if section.min_score is not None:
            best = [sample for sample in best if sample.score >= section.min_score]
        if section.distinct:
            # A dict keeps the last of equal keys. In reverse order, that is the best and first
            # sampled one of equal responses.
            best = list({sample.response_ids.tobytes(): sample for sample in best[::-1]}.values())
            best.sort(key=lambda sample: (-sample.score, sample.sample_index))
        selected += best[: section.top_k]
    return selected


def row_of(sample: Rollout) -> dict[str, Any]:
    """Return a response as a row that `data.prompts` of the recipe sft can read."""
    return {
        "prompt": prompt_cell(sample),
        "response": sample.response,
        "label": None if sample.label is None else str(sample.label),
        "score": sample.score,
        "finish_reason": sample.finish_reason,
        "prompt_index": sample.prompt_index,
    }
