"""Fill the batch of a step: drop groups without a learning signal and draw other prompts (DAPO)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from raypo.config import FilterSection, RewardSection
from raypo.metrics.clock import Clock
from raypo.ppo.groups import filter_groups
from raypo.rollout.collect import is_trainable, refuse_too_many_failures, samples_of
from raypo.types import Rollout


@dataclass
class StepBatch:
    """Rollouts of a step, which are added in rounds.

    A round draws exactly as many prompts as groups are missing. No rollouts are left over for a
    later step, for which they would be stale.
    """

    scored: list[Rollout] = field(default_factory=list)
    """All samples, including those that were filtered or failed."""
    trained: list[Rollout] = field(default_factory=list)
    """Samples to train on."""
    missing_groups: int = 0
    """Number of groups that the step lacks."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Counts of samples: sampled = trained + filtered + failed."""
    clock: Clock = field(default_factory=Clock)
    """Times of sampling and scoring."""
    filter: FilterSection = field(default_factory=FilterSection)
    reward: RewardSection = field(default_factory=RewardSection)
    """The section `reward`. Its `max_failed_fraction` limits the number of failed samples."""
    _num_rounds: int = 0

    @property
    def num_wanted(self) -> int:
        """Number of prompts to draw in the next round. 0 ends the sampling."""
        refills = self.filter.max_refills if self.filter.enabled else 0
        return self.missing_groups if self._num_rounds <= refills else 0

    def add(self, scored: list[Rollout]) -> None:
        """Add the rollouts of a round; drop groups without a signal.

        Args:
            scored: The rollouts of `num_wanted` prompts.

        Raises:
            RewardError: more than `reward.max_failed_fraction` of the samples of all rounds so far
                have failed.
        """
        self.scored += scored
        refuse_too_many_failures(self.scored, self.reward)
        passed = passing(scored, self.filter)
        self.trained += [rollout for rollout in passed if is_trainable(rollout)]
        groups = len({rollout.group_index for rollout in passed})
        self.missing_groups -= groups if self.filter.enabled else self.missing_groups
        self.metrics = _counts(self.scored, self.trained)
        if self.filter.enabled:
            self.metrics["rollout/refills"] = float(self._num_rounds)
            self.metrics["rollout/groups_missing"] = float(self.missing_groups)
        self._num_rounds += 1

    def counts(self, step: int, max_staleness: int | None) -> dict[str, float]:
        """Return `metrics` with the samples that the update drops because they are stale.

        Args:
            step: The step, counted from 1.
            max_staleness: Value of `ppo.correction.max_staleness`. A sample is dropped if all its
                tokens are staler. None means that none is dropped.
        """
        metrics = self.metrics | {"rollout/samples_dropped": 0.0}
        if max_staleness is None:
            return metrics
        newest: dict[tuple[int, int], int] = {}  # sample -> newest version in any of its rows
        for rollout in self.trained:
            sample = rollout.group_index, rollout.sample_index
            versions = rollout.weight_versions[rollout.response_mask]
            newest[sample] = max(versions.max(), newest.get(sample, -1))
        dropped = sum(step - 1 - version > max_staleness for version in newest.values())
        metrics["rollout/samples_dropped"] = float(dropped)
        metrics["rollout/samples_trained"] -= dropped
        return metrics


def passing(scored: list[Rollout], section: FilterSection) -> list[Rollout]:
    """Return, in order, the rollouts whose group passes the filter. If it is off, all pass."""
    if not section.enabled or not scored:
        return scored
    groups: dict[int, list[Rollout]] = {}
    for sample in samples_of(scored):
        groups.setdefault(sample.group_index, []).append(sample)
    shape = (len(groups), max(map(len, groups.values())))
    scores = torch.zeros(shape, dtype=torch.float64)  # [P, n]
    valid = torch.zeros(shape, dtype=torch.bool)
    for row, members in enumerate(groups.values()):
        for column, sample in enumerate(members):
            scores[row, column], valid[row, column] = sample.score, is_trainable(sample)
    passes = filter_groups(scores, valid, section).tolist()
    passed = {index for index, group_passes in zip(groups, passes, strict=True) if group_passes}
    return [rollout for rollout in scored if rollout.group_index in passed]


def _counts(scored: list[Rollout], trained: list[Rollout]) -> dict[str, float]:
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
