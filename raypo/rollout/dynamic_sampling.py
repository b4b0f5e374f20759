"""Fill the batch of a step: drop groups without a learning signal and draw other prompts (DAPO)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from raypo.config import FilterSection, PPOConfig, RewardSection
from raypo.metrics.clock import Clock
from raypo.ppo.groups import filter_groups
from raypo.rollout.collect import is_trainable, refuse_too_many_failures, samples_of
from raypo.types import Rollout


@dataclass(frozen=True)
class Collected:
    """Rollouts of a step."""

    scored: list[Rollout]
    """All samples, including those that were filtered or failed."""
    trained: list[Rollout]
    """Samples to train on."""
    missing_groups: int
    """Number of groups that the step lacks."""
    metrics: dict[str, float]
    """Counts of samples: sampled = trained + filtered + failed."""
    clock: Clock = field(default_factory=Clock)
    """Times of sampling and scoring."""


@dataclass
class StepBatch:
    """Batch of a step while it is being filled, in rounds.

    A round draws exactly as many prompts as groups are missing. No rollouts are left over for a
    later step, for which they would be stale.
    """

    missing: int
    """Number of groups that the step still lacks."""
    filter: FilterSection
    reward: RewardSection
    """The section `reward`. Its `max_failed_fraction` limits the number of failed samples."""
    _rounds: int = 0
    _scored: list[Rollout] = field(default_factory=list)
    _kept: list[Rollout] = field(default_factory=list)

    @classmethod
    def from_config(cls, config: PPOConfig) -> StepBatch:
        """Return an empty batch of the config's size and filter."""
        return cls(config.rollout.prompts_per_step, config.ppo.filter, config.reward)

    @property
    def num_wanted(self) -> int:
        """Number of prompts to draw in the next round. 0 ends the sampling."""
        refills = self.filter.max_refills if self.filter.enabled else 0
        return self.missing if self._rounds <= refills else 0

    def add(self, scored: list[Rollout]) -> None:
        """Add the rollouts of a round; drop groups without a signal.

        Args:
            scored: The rollouts of `num_wanted` prompts.

        Raises:
            RewardError: more than `reward.max_failed_fraction` of the samples of all rounds so far
                have failed.
        """
        self._scored += scored
        refuse_too_many_failures(self._scored, self.reward)
        passed = passing(scored, self.filter)
        self._kept += passed
        groups = len({rollout.group_index for rollout in passed})
        self.missing -= groups if self.filter.enabled else self.missing
        self._rounds += 1

    def collected(self) -> Collected:
        """Return the filled batch, with its counts."""
        trained = [rollout for rollout in self._kept if is_trainable(rollout)]
        metrics = _metrics(self._scored, trained)
        if self.filter.enabled:
            metrics["rollout/refills"] = float(self._rounds - 1)
            metrics["rollout/groups_missing"] = float(self.missing)
        return Collected(self._scored, trained, self.missing, metrics)


def passing(scored: list[Rollout], section: FilterSection) -> list[Rollout]:
    """Return, in order, the rollouts whose group passes the filter. If it is off, all pass."""
    if not section.enabled or not scored:
        return scored
    groups: dict[int, list[Rollout]] = {}
    for each in samples_of(scored):
        groups.setdefault(each.group_index, []).append(each)
    shape = (len(groups), max(map(len, groups.values())))
    scores = torch.zeros(shape, dtype=torch.float64)  # [P, n]
    valid = torch.zeros(shape, dtype=torch.bool)
    for row, members in enumerate(groups.values()):
        for place, each in enumerate(members):
            scores[row, place], valid[row, place] = each.score, is_trainable(each)
    kept = filter_groups(scores, valid, section)
    passed = {index for index, keep in zip(groups, kept.tolist(), strict=True) if keep}
    return [each for each in scored if each.group_index in passed]


def _metrics(scored: list[Rollout], trained: list[Rollout]) -> dict[str, float]:
    samples, num_trained = samples_of(scored), len(samples_of(trained))
    failed = sum(not is_trainable(sample) for sample in samples)
    counts = {
        "rollout/samples_empty": sum(not sample.response_mask.any() for sample in samples),
        "rollout/samples_failed": failed,  # those that are empty, too
        "rollout/samples_filtered": len(samples) - num_trained - failed,
        "rollout/samples_sampled": len(samples),
        "rollout/samples_trained": num_trained,
    }
    return {name: float(count) for name, count in counts.items()}
