"""Metrics of rollouts, and rows for the rollout files."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

import numpy as np
import torch

from raypo.config import OnlineConfig, PPOConfig
from raypo.health.slowness import TAIL_SHARE
from raypo.metrics.reduce import WeightedMeans, without_lone
from raypo.rollout.batch_scoring import named_numbers, reward_parts, reward_texts
from raypo.rollout.collect import Sampling
from raypo.rollout.step_batch import StepBatch
from raypo.run.run import Run
from raypo.types import Experience, Rollout


def rollout_metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Return metrics of the samples' raw scores and lengths, or {} if there are no samples."""
    means = WeightedMeans()
    scores_by_group: dict[int, list[float]] = {}
    tokens_by_sample: dict[tuple[int, int], int] = {}  # an agent's sample may have several rollouts
    score_by_sample: dict[tuple[int, int], float] = {}
    truncated = {
        (rollout.group_index, rollout.sample_index)
        for rollout in rollouts
        if rollout.finish_reason == "length"
    }
    for rollout in rollouts:
        sample = rollout.group_index, rollout.sample_index
        tokens_by_sample[sample] = tokens_by_sample.get(sample, 0) + rollout.num_sampled
        means.add("rollout/prompt_tokens_mean", len(rollout.prompt_ids), 1)
        if rollout.row_index:  # the sample was already counted with its first rollout
            continue
        if episode := rollout.episode:
            means.add("rollout/turns_mean", episode.num_turns, 1)
            means.maximum("rollout/turns_max", episode.num_turns)
            means.add("perf/environment_s_mean", episode.environment_s, 1)
            means.maximum("perf/environment_s_max", episode.environment_s)
            means.total("rollout/episodes_failed", episode.error is not None)
            tool_uses = episode.tool_uses
            means.add("tools/calls_mean", len(tool_uses), 1)
            means.total("tools/failures", sum(use.error is not None for use in tool_uses))
            means.add("perf/tools_s_mean", sum(use.seconds for use in tool_uses), 1)
        for name, value in named_numbers(rollout).items():
            means.add(name, value, 1)
        if math.isfinite(rollout.score):
            scores_by_group.setdefault(rollout.group_index, []).append(rollout.score)
            score_by_sample[sample] = rollout.score
            if rollout.data_source:
                means.add(f"rollout/score_mean/{rollout.data_source}", rollout.score, 1)
            means.add("rollout/score_mean", rollout.score, 1)
    means.deviation("rollout/score_std", list(chain(*scores_by_group.values())))
    for sample, tokens in tokens_by_sample.items():
        means.add("rollout/truncated_fraction", sample in truncated, 1)
        means.total("rollout/response_tokens", tokens)
        means.add("rollout/response_tokens_mean", tokens, 1)
        means.maximum("rollout/response_tokens_max", tokens)
    for scores in scores_by_group.values():
        if len(scores) > 1:
            means.add("rollout/zero_variance_fraction", len(set(scores)) == 1, 1)
    metrics = without_lone(means.values(), "rollout/score_mean/")
    metrics |= _length_effects(tokens_by_sample, score_by_sample, truncated)
    missing_scores = dict.fromkeys(("rollout/score_mean", "rollout/score_std"), math.nan)
    return missing_scores | metrics if metrics else {}


def _length_effects(
    tokens: Mapping[tuple[int, int], int],
    scores: Mapping[tuple[int, int], float],
    truncated: Container[tuple[int, int]],
) -> dict[str, float]:
    """Return how much longer the longest responses are, and how a score depends on the length.

    `rollout/tail_fraction` is the share of the longest response by which it exceeds all but the
    longest 3 %. `rollout/score_length_correlation` is Pearson's correlation after each group's
    means are subtracted. `rollout/truncated_score_gap` is the mean score of the responses that
    ended, minus that of those that were cut off. A metric without a value is left out.
    """
    if not tokens:
        return {}
    lengths = np.array([*tokens.values()])
    usual = np.quantile(lengths, 1.0 - TAIL_SHARE, method="inverted_cdf")
    metrics = {"rollout/tail_fraction": float(1.0 - usual / max(lengths.max(), 1))}
    cut = np.array([sample in truncated for sample in scores], bool)
    values = np.array([*scores.values()])
    if cut.any() and not cut.all():
        gap = values[~cut].mean() - values[cut].mean()
        metrics["rollout/truncated_score_gap"] = float(gap)
    if len(scores) > 1:
        pairs = np.stack([values, [float(tokens[sample]) for sample in scores]])  # [2, samples]
        _, group = np.unique([group for group, _ in scores], return_inverse=True)
        counts = np.bincount(group)
        means = np.stack([np.bincount(group, row) / counts for row in pairs])
        pairs -= means[:, group]
        norms = np.sqrt((pairs**2).sum(1))
        if norms.all():
            correlation = (pairs[0] * pairs[1]).sum() / norms.prod()
            metrics["rollout/score_length_correlation"] = float(correlation)
    return metrics


def batch_metrics(
    run: Run[OnlineConfig],
    batch: StepBatch,
    counts: dict[str, float],
    sampling: Sampling,
    *,
    step: int,
) -> dict[str, float]:
    """Return metrics of a step's samples: scores, lengths, and counts by outcome.

    Args:
        run: The run.
        batch: Rollouts of the step.
        counts: Counts from `PromptSource.counts`.
        sampling: Sampling parameters of the run, including its episode runner if there is one.
        step: The step, counted from 1.
    """
    config = run.config
    metrics = rollout_metrics(batch.scored)
    if sampling.episodes:
        metrics["perf/wait_for_environments_s"] = sampling.episodes.waited_s()
    if not isinstance(config, PPOConfig):  # the recipe itself selects the training samples
        key = "rollout/samples_sampled"
        return metrics | {key: batch.metrics[key]}
    metrics |= counts | batch.counts(step, config.ppo.correction.max_staleness)
    num_missing, num_wanted = batch.missing_groups, config.rollout.prompts_per_step
    if num_missing:
        outcome = (
            "no update"
            if num_missing == num_wanted
            else f"trains on {num_wanted - num_missing} groups"
        )
        run.tell.message(
            f"step {step}: {num_missing} of {num_wanted} groups are missing after "
            f"{metrics['rollout/refills']:.0f} refills (ppo.filter.max_refills); {outcome}"
        )
    return metrics


RATES = {
    "train/examples": "perf/samples_per_s",
    "train/tokens": "perf/tokens_per_s",
    "rollout/samples_sampled": "perf/samples_per_s",
    "rollout/response_tokens": "perf/response_tokens_per_s",
}
"""Maps the name of a count to the name of its rate. If two counts share a rate, the later one is
used."""


def speed_metrics(metrics: dict[str, float], step_s: float) -> dict[str, float]:
    """Return metrics of a step's speed: its duration in seconds, and its counts per second."""
    rates = {rate: metrics[count] / step_s for count, rate in RATES.items() if count in metrics}
    return {"time/step_s": step_s} | rates


def rollout_rows(rollouts: Sequence[Rollout], experience: Experience) -> list[dict[str, Any]]:
    """Return a row of `rollouts/step_*.parquet` for each rollout that this worker trains on.

    Args:
        rollouts: Rollouts of this worker.
        experience: Tensors of these rollouts, in the same order.
    """
    assert experience.advantages is not None
    assert experience.old_log_probs is not None
    mask = experience.response_mask
    tokens = mask.sum(1).clamp(min=1)
    mean_advantages = (experience.advantages.sum(1) / tokens).tolist()
    advantages = experience.advantages.float().cpu().numpy()
    kl: list[float | None] = [None] * len(rollouts)
    references = None
    if experience.ref_log_probs is not None:
        references = experience.ref_log_probs.float().cpu().numpy()
        log_ratio = torch.where(mask, experience.old_log_probs - experience.ref_log_probs, 0.0)
        kl = log_ratio.sum(1).tolist()
    return [
        sample_row(rollout)
        | {
            "ref_log_probs": None
            if references is None
            else references[row, : len(rollout.response_ids)],
            "advantages": advantages[row, : len(rollout.response_ids)],
            "advantage_mean": mean_advantages[row],
            "kl": kl[row],
        }
        for row, rollout in enumerate(rollouts)
    ]


def sample_row(rollout: Rollout) -> dict[str, Any]:
    """Return the row of a sample that is not trained on, such as a held-out sample.

    It lacks the columns that are added for training samples (`rollout_rows`).
    """
    return {
        "prompt": rollout.prompt,
        "response": rollout.response,
        "label": rollout.label,
        "data_source": rollout.data_source,
        "row": {
            name: value
            for name, value in rollout.row.items()
            if value is not rollout.messages and value is not rollout.label
        },
        "prompt_ids": rollout.prompt_ids,
        "response_ids": rollout.response_ids,
        "log_probs": rollout.log_probs,
        "response_mask": None if rollout.response_mask.all() else rollout.response_mask,
        "turn_rewards": rollout.turn_rewards,
        "turn_index": rollout.turn_index,
        "episode": rollout.episode and asdict(rollout.episode),
        "score": rollout.score,
        "scores_by_source": dict(rollout.scores_by_source),
        "finish_reason": rollout.finish_reason,
        "weight_version": rollout.weight_version,
        "weight_versions": rollout.weight_versions,
        "prompt_index": rollout.prompt_index,
        "sample_index": rollout.sample_index,
        "group_index": rollout.group_index,
        "row_index": rollout.row_index,
        "reward_texts": reward_texts(rollout) or None,
        **{f"reward/{name}": part for name, part in reward_parts(rollout).items()},
    }
