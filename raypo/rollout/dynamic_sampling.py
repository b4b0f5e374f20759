"""Fill a step: sample, score, drop groups without a signal (DAPO), and sample others for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from raypo.collectives import Workers, as_tensor
from raypo.config import FilterSection, RewardSection
from raypo.metrics.reduce import WeightedMeans
from raypo.ppo.groups import filter_groups
from raypo.rollout.collect import is_trainable, refuse_too_many_failures, samples_of
from raypo.types import ScoredRollout


@dataclass(frozen=True)
class Collected:
    """This worker's rollouts of a step."""

    scored: list[ScoredRollout]
    """All samples."""
    trained: list[ScoredRollout]
    """Samples to train on."""
    missing_groups: int
    """Groups that the step lacks, over all workers."""
    metrics: dict[str, float]
    """Counts over all workers: sampled = trained + filtered + failed."""


def fill_step(
    scored_rollouts: Callable[[int], list[ScoredRollout]],
    *,
    prompts_per_step: int,
    section: FilterSection,
    reward: RewardSection,
    workers: Workers,
) -> Collected:
    """Collect the rollouts of one step; all workers call it, and go through the same rounds.

    A round draws exactly as many prompts as groups are missing. Nothing is left over for a later
    step, so no rollout outlives the weights that sampled it.

    Args:
        scored_rollouts: Draws a number of prompts over all workers and returns this worker's
            rollouts. All samples of a prompt lie on one worker.
        prompts_per_step: Groups that the step needs, over all workers.
        section: The filter (`ppo.filter`).
        reward: Its `max_failed_fraction` bounds the failed samples.
        workers: All workers.

    Raises:
        RewardError: more samples failed than `reward.max_failed_fraction`, of all rounds so far.
    """
    scored: list[ScoredRollout] = []
    kept: list[ScoredRollout] = []
    missing, rounds = prompts_per_step, 0
    while missing and rounds < 1 + (section.max_refills if section.enabled else 0):
        fresh = scored_rollouts(missing)
        scored += fresh
        refuse_too_many_failures(scored, reward, workers)
        passed = passing(fresh, section)
        kept += passed
        groups = len({each.rollout.group_index for each in passed})
        missing = missing - int(workers.sum(as_tensor(groups))) if section.enabled else 0
        rounds += 1
    trained = [each for each in kept if is_trainable(each)]
    metrics = _metrics(scored, trained, workers)
    if section.enabled:
        metrics["rollout/refills"] = float(rounds - 1)
        metrics["rollout/groups_missing"] = float(missing)
    return Collected(scored, trained, missing, metrics)


def passing(scored: list[ScoredRollout], section: FilterSection) -> list[ScoredRollout]:
    """Return the rollouts whose group passes the filter, in their order; all if it is off."""
    if not section.enabled or not scored:
        return scored
    groups: dict[int, list[ScoredRollout]] = {}
    for each in samples_of(scored):
        groups.setdefault(each.rollout.group_index, []).append(each)
    shape = (len(groups), max(map(len, groups.values())))
    scores = torch.zeros(shape, dtype=torch.float64)  # [P, n]
    valid = torch.zeros(shape, dtype=torch.bool)
    for row, members in enumerate(groups.values()):
        for place, each in enumerate(members):
            scores[row, place], valid[row, place] = each.score, is_trainable(each)
    kept = filter_groups(scores, valid, section)
    passed = {index for index, keep in zip(groups, kept.tolist(), strict=True) if keep}
    return [each for each in scored if each.rollout.group_index in passed]


def _metrics(
    scored: list[ScoredRollout], trained: list[ScoredRollout], workers: Workers
) -> dict[str, float]:
    scored, trained = samples_of(scored), samples_of(trained)
    failed = sum(not is_trainable(each) for each in scored)
    means = WeightedMeans()
    means.total("rollout/samples_sampled", len(scored))
    means.total("rollout/samples_trained", len(trained))
    means.total("rollout/samples_failed", failed)
    means.total("rollout/samples_filtered", len(scored) - len(trained) - failed)
    empty = sum(not each.rollout.response_mask.any() for each in scored)
    means.total("rollout/samples_empty", empty)  # of the failed ones
    return means.reduce(workers)
