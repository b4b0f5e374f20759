"""Who scores responses: a reward function, reward models, or both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from raypo.config import ModelSection, RewardSection
from raypo.rewards.scoring import RewardFunction, score
from raypo.types import Rollout

FUNCTION = "function"


@dataclass(frozen=True)
class Judges:
    """The sources of a score, and what each counts for."""

    function: RewardFunction | None
    models: tuple[Any, ...]
    """Handle of each reward model's deployment, in the order of `model.reward`."""
    weights: dict[str, float]
    """Source -> weight: `function`, and `model` or `model_0`, `model_1`, ..."""

    @classmethod
    def of(
        cls,
        function: RewardFunction | None,
        models: tuple[Any, ...],
        *,
        reward: RewardSection,
        model: ModelSection,
    ) -> Judges:
        """The judges that a config names."""
        entries = model.reward or ()
        weights = {
            name: reward.weights.model * entry.weight
            for name, entry in zip(model_sources(len(entries)), entries, strict=True)
        }
        if function is not None:
            weights[FUNCTION] = reward.weights.function
        return cls(function, models, weights)

    def scores_by_source(self, rollouts: list[Rollout]) -> list[dict[str, float]]:
        """What each source says of each rollout; the models work while the function does."""
        pending = [handle.score.remote(rollouts) for handle in self.models] if rollouts else []
        by_source: dict[str, list[float]] = {}
        if self.function is not None:
            by_source[FUNCTION] = score(self.function, rollouts, max_failed_fraction=1.0)
        for name, response in zip(model_sources(len(self.models)), pending, strict=False):
            by_source[name] = response.result()
        return [
            {name: values[row] for name, values in by_source.items()}
            for row in range(len(rollouts))
        ]

    def total(self, by_source: dict[str, float]) -> float:
        """The score that PPO trains on: the weighted sum; NaN where any source failed."""
        return math.fsum(self.weights[name] * value for name, value in by_source.items())

    def model_total(self, by_source: dict[str, float]) -> float:
        """The reward models' part of the score."""
        rest = {name: value for name, value in by_source.items() if name != FUNCTION}
        return self.total(rest)


def model_sources(count: int) -> list[str]:
    """Names of the reward models among the sources of a score."""
    return ["model"] if count == 1 else [f"model_{number}" for number in range(count)]
