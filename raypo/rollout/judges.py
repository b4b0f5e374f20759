"""Who scores responses: a reward function, reward models, reward servers, or all of them."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from raypo.calls import Method
from raypo.config import ModelSection, RewardSection
from raypo.rewards.scoring import FailedScore, RewardFunction, parts_of, score
from raypo.types import Rollout, ScoredRollout

FUNCTION, URL, EPISODE = "function", "url", "episode"


class RewardModel(Protocol):
    """What judging asks of a reward model."""

    @property
    def score(self) -> Method[[list[Rollout]], list[float]]:
        """One score a rollout, in the order given."""
        ...


@dataclass(frozen=True)
class Judges:
    """The sources of a score, and what each counts for."""

    function: RewardFunction | None
    models: tuple[RewardModel, ...]
    """In the order of `model.reward`."""
    weights: dict[str, float]
    """Source -> weight: `function`, `url`, and `model` or `model_0`, `model_1`, ...; what an
    episode's environment says counts as it is."""
    servers: RewardFunction | None = None
    """Asks the servers of `reward.url`."""

    @classmethod
    def of(
        cls,
        function: RewardFunction | None,
        models: tuple[RewardModel, ...],
        *,
        reward: RewardSection,
        model: ModelSection,
        servers: RewardFunction | None = None,
    ) -> Judges:
        """The judges that a config names."""
        entries = model.reward or ()
        weights = {
            name: reward.weights.model * entry.weight
            for name, entry in zip(model_sources(len(entries)), entries, strict=True)
        }
        if function is not None:
            weights[FUNCTION] = reward.weights.function
        if servers is not None:
            weights[URL] = reward.weights.url
        return cls(function, models, weights, servers)

    def scores_by_source(self, rollouts: list[Rollout]) -> list[dict[str, float]]:
        """What each source says of each rollout; all of them work at the same time."""
        pending = [handle.score.remote(rollouts) for handle in self.models] if rollouts else []
        by_source: dict[str, list[float]] = {}
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(_scores, self.servers, rollouts) if self.servers else None
            if self.function is not None:
                by_source[FUNCTION] = _scores(self.function, rollouts)
            if asked is not None:
                by_source[URL] = asked.result()
        for name, response in zip(model_sources(len(self.models)), pending, strict=False):
            by_source[name] = response.result()
        episodes = [rollout.episode for rollout in rollouts if rollout.episode]
        if episodes:
            by_source[EPISODE] = [FailedScore(e.error) if e.error else e.score for e in episodes]
        return [
            {name: values[row] for name, values in by_source.items()}
            for row in range(len(rollouts))
        ]

    def total(self, by_source: dict[str, float]) -> float:
        """The score that PPO trains on: the weighted sum; NaN where any source failed."""
        return math.fsum(self.weights.get(name, 1.0) * value for name, value in by_source.items())

    def model_total(self, by_source: dict[str, float]) -> float:
        """The reward models' part of the score."""
        others = (FUNCTION, URL, EPISODE)
        rest = {name: value for name, value in by_source.items() if name not in others}
        return self.total(rest)


def _scores(function: RewardFunction, rollouts: list[Rollout]) -> list[float]:
    return score(function, rollouts, max_failed_fraction=1.0)


def reward_parts(scored: ScoredRollout) -> dict[str, float]:
    """The named numbers that reward functions gave beside a score."""
    named: dict[str, float] = {}
    for value in (*scored.scores_by_source.values(), scored.score):
        named |= parts_of(value)
    return named


def named_numbers(scored: ScoredRollout) -> dict[str, float]:
    """Those of reward functions, `reward/<name>`, and of an episode, `episode/<name>`."""
    named = {f"reward/{name}": part for name, part in reward_parts(scored).items()}
    if episode := scored.rollout.episode:
        named |= {f"episode/{name}": value for name, value in episode.metrics.items()}
    return named


def model_sources(count: int) -> list[str]:
    """Names of the reward models among the sources of a score."""
    return ["model"] if count == 1 else [f"model_{number}" for number in range(count)]
