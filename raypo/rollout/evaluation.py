"""Evaluation on held-out prompts: engines sample responses, and `eval.function` scores them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from raypo.config import EvalSection
from raypo.metrics.reduce import WeightedMeans, without_lone
from raypo.ppo.groups import pass_at_k
from raypo.rewards.scoring import RewardFunction, score
from raypo.rollout.batch_scoring import Scorer, named_numbers
from raypo.rollout.collect import Sampler, Sampling, samples_of
from raypo.types import Prompt, Rollout

EVALUATION_STREAM = 1
"""Stream number that keeps the seeds of held-out samples apart from those of training."""
PRIORITY = -1
"""Evaluation requests take priority over look-ahead training rollouts, because the step is blocked
on them."""


def evaluate_policy(
    prompts: Sequence[Prompt],
    sampler: Sampler,
    function: RewardFunction | None,
    *,
    section: EvalSection,
    scorer: Scorer | None = None,
    before_scoring: Callable[[], None] = lambda: None,
    total: WeightedMeans | None = None,
) -> tuple[dict[str, float], list[Rollout]]:
    """Sample and score responses to held-out prompts with the engines' current weights.

    Every evaluation of a run uses the same seeds. Responses that cannot be scored are left out of
    the means and counted in `eval/failed`.

    Args:
        prompts: All held-out prompts.
        sampler: Sampler of training. `eval` may override its sampling parameters.
        function: Reward function that scores the responses. None means that `scorer` scores them.
        section: The section `eval` of the config.
        scorer: Scorer of training. If it has reward models, `eval/reward_model_mean` is added.
        before_scoring: Callback that is called when all responses are sampled.
        total: Accumulator to which this evaluation is added, for the metrics of several.

    Returns:
        metrics: `eval/*`, such as `eval/score_mean` (overall and for each data source) and
            `eval/response_tokens_mean`.
        rollouts: The responses with the scores that are reported.
    """
    sampler = replace(sampler, sampling=_of_evaluation(section, sampler.sampling))
    drawn = [replace(prompt, group_index=prompt.index) for prompt in prompts]
    rollouts = sampler.sample(drawn)
    before_scoring()
    means = WeightedMeans()
    judged: list[Rollout] = []
    if scorer and (scorer.models or function is None):
        # `models_apart=False` sends all rollouts to each model in one call. Reference log-probs are
        # not needed.
        judged = replace(scorer, reference=None, models_apart=False).score(rollouts)
    if scorer and scorer.models:
        by_models = [scorer.model_total(rollout.scores_by_source) for rollout in judged]
        finite = [value for value in by_models if math.isfinite(value)]
        means.add("eval/reward_model_mean", math.fsum(finite), len(finite))
    rows = judged
    if function is not None:
        rows = judged or rollouts
        scores = score(function, rollouts)
        rows = [replace(row, score=value) for row, value in zip(rows, scores, strict=True)]
    samples = samples_of(rows)
    scores = [sample.score for sample in samples]
    for sample in samples:
        if sample.data_source and math.isfinite(sample.score):
            means.add(f"eval/score_mean/{sample.data_source}", sample.score, 1)
    scored = [value for value in scores if math.isfinite(value)]
    means.add("eval/score_mean", math.fsum(scored), len(scored))
    for sample in samples:
        for name, value in named_numbers(sample).items():
            means.add(f"eval/{name}", value, 1)
    tokens = sum(rollout.num_sampled for rollout in rollouts)
    means.add("eval/response_tokens_mean", tokens, len(samples))
    means.total("eval/failed", len(scores) - len(scored))
    by_prompt = torch.tensor(scores, dtype=torch.float64)
    _add_pass_at_k(means, by_prompt.view(len(drawn), section.samples_per_prompt), section.pass_at)
    if total is not None:
        total.include(means)
    return without_lone(means.values(), "eval/score_mean/"), rows


def _add_pass_at_k(
    means: WeightedMeans,
    scores: torch.Tensor,  # [P, S] float64
    pass_at: Sequence[int],
) -> None:
    """Add `eval/pass_at_<k>` of the prompts that have k scored samples."""
    is_scored = scores.isfinite()
    num_scored, num_right = is_scored.sum(1), (is_scored & scores.ge(1.0)).sum(1)
    for k in pass_at:
        has_enough = num_scored >= k
        passed = pass_at_k(num_right[has_enough], num_scored[has_enough], k=k)
        means.add(f"eval/pass_at_{k}", passed.sum(), has_enough.sum())


def _of_evaluation(section: EvalSection, sampling: Sampling) -> Sampling:
    """Return the sampling parameters of training with the overrides of `eval`."""
    temperature = section.temperature
    whole: dict[str, Any] = {"top_p": 1.0, "top_k": None, "min_p": 0.0}
    return replace(
        sampling,
        **(whole if temperature == 0.0 else {}),
        samples_per_prompt=section.samples_per_prompt,
        temperature=sampling.temperature if temperature is None else temperature,
        seeds="request",  # all evaluations of a run use the same seeds, to be comparable
        stream=EVALUATION_STREAM,
        priority=PRIORITY,
    )
