"""Who scores responses: a reward function, reward models, reward servers, or all of them."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from raypo.config import ModelSection, RewardSection
from raypo.deployed import Answer, Method
from raypo.rewards.scoring import FailedScore, RewardFunction, parts_of, score
from raypo.types import Rollout, ScoredRollout

FUNCTION, URL, EPISODE = "function", "url", "episode"


class RewardModel(Protocol):
    """What judging asks of a reward model."""

    @property
    def score(self) -> Method[[list[Rollout]], list[float]]:
        """One score a rollout, in the order given."""
        ...


class Reference(Protocol):
    """What a step asks of the reference model."""

    @property
    def log_probs(self) -> Method[[list[Rollout]], list[np.ndarray]]:
        """float32 [T] of each response's tokens, nats."""
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
    processes: int = 0
    """Of its own that the function has; without any it sees all rollouts at once."""

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
        return cls(function, models, weights, servers, reward.processes)

    def scores_by_source(self, rollouts: list[Rollout]) -> list[dict[str, float]]:
        """What each source says of each rollout; all of them work at the same time."""
        return [dict(each.scores_by_source) for each in Judging(self).scored(rollouts)]

    def total(self, by_source: dict[str, float]) -> float:
        """The score that PPO trains on: the weighted sum; NaN where any source failed."""
        return math.fsum(self.weights.get(name, 1.0) * value for name, value in by_source.items())

    def model_total(self, by_source: dict[str, float]) -> float:
        """The reward models' part of the score."""
        others = (FUNCTION, URL, EPISODE)
        rest = {name: value for name, value in by_source.items() if name not in others}
        return self.total(rest)


class Judging:
    """A worker's rollouts on their way to their scores and reference log-probs.

    Who has cores or a device apart from the engines judges a draw's rollouts when they are there,
    while others are sampled: a function in processes of its own, reward servers, and dedicated
    models. Whatever comes when, models are asked for the rollouts of one draw at a time then, so
    that no rounding depends on it.
    """

    def __init__(
        self, judges: Judges, reference: Reference | None = None, *, models_apart: bool = False
    ) -> None:
        """Nothing is judged yet.

        Args:
            judges: Who gives scores.
            reference: Who gives log-probs, if anybody.
            models_apart: They and the reward models have devices or cores of their own.
        """
        self._judges, self._reference, self._models_apart = judges, reference, models_apart
        self._apart: dict[str, _Line] = {}
        self._at_the_end: dict[str, _Line] = {}
        if judges.function is not None:
            lines = self._apart if judges.processes else self._at_the_end
            lines[FUNCTION] = _Line(judges.function, judges.processes or 1)
        if judges.servers is not None:
            self._apart[URL] = _Line(judges.servers, 1)
        self._asked: list[_OfModels] = []
        self._heard: set[int] = set()
        """Draws that who is apart judges."""
        self._lock = threading.Lock()

    @property
    def hears(self) -> bool:
        """Whether anybody judges before all is sampled."""
        has_models = bool(self._judges.models) or self._reference is not None
        return bool(self._apart) or (self._models_apart and has_models)

    def hear(self, rollouts: list[Rollout]) -> None:
        """All rollouts of some draws; of those that were heard already they are passed over."""
        by_draw: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            by_draw.setdefault(rollout.group_index, []).append(rollout)
        with self._lock:
            new = [of_draw for draw, of_draw in by_draw.items() if draw not in self._heard]
            for of_draw in new if self._models_apart else ():
                self._ask_models(of_draw)  # what fails is asked once more by `scored`, which raises
            for line in self._apart.values():
                line.add([rollout for of_draw in new for rollout in of_draw])
            self._heard |= by_draw.keys()

    def scored(self, rollouts: list[Rollout]) -> list[ScoredRollout]:
        """All of them, in the order given, those that were heard among them.

        Raises:
            Exception: what a judge raised.
        """
        if not rollouts:
            return []
        self.hear(rollouts)
        for line in self._at_the_end.values():
            line.add(rollouts)
        if not self._models_apart:
            self._ask_models(rollouts)
        lines = {name: line.scores() for name, line in (self._at_the_end | self._apart).items()}
        by_model: dict[int, dict[str, float]] = {}
        log_probs: dict[int, np.ndarray | None] = {}
        for each in self._asked:
            keys = [id(rollout) for rollout in each.rollouts]
            rows = each.reference.result() if each.reference else [None] * len(keys)
            log_probs |= zip(keys, rows, strict=True)
            for name, answer in zip(model_sources(len(each.models)), each.models, strict=True):
                for key, value in zip(keys, answer.result(), strict=True):
                    by_model.setdefault(key, {})[name] = value
        return [
            self._one(
                rollout,
                {name: scores[key] for name, scores in lines.items()} | by_model.get(key, {}),
                log_probs[key],
            )
            for rollout, key in zip(rollouts, map(id, rollouts), strict=True)
        ]

    def _one(
        self, rollout: Rollout, by_source: dict[str, float], log_probs: np.ndarray | None
    ) -> ScoredRollout:
        if (episode := rollout.episode) is not None:
            by_source[EPISODE] = FailedScore(episode.error) if episode.error else episode.score
        return ScoredRollout(rollout, self._judges.total(by_source), by_source, log_probs)

    def _ask_models(self, rollouts: list[Rollout]) -> None:
        reference = self._reference.log_probs.remote(rollouts) if self._reference else None
        models = [each.score.remote(rollouts) for each in self._judges.models]
        self._asked.append(_OfModels(rollouts, reference, models))


@dataclass(frozen=True)
class _OfModels:
    """Rollouts and what models were asked of them."""

    rollouts: list[Rollout]
    reference: Answer[list[np.ndarray]] | None
    models: list[Answer[list[float]]]


class _Line:
    """Rollouts before a function: a caller that is free takes all that have come."""

    def __init__(self, function: RewardFunction, num_callers: int) -> None:
        self._function, self._num_free = function, num_callers
        self._waiting: list[Rollout] = []
        self._num_left = 0
        self._scores: dict[int, float] = {}
        """By `id` of the rollout, which its judging holds."""
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def add(self, rollouts: list[Rollout]) -> None:
        """They are judged as soon as a caller is free."""
        with self._changed:
            self._waiting += rollouts
            self._num_left += len(rollouts)
            if self._num_free:
                self._num_free -= 1
                threading.Thread(target=self._work, daemon=True).start()

    def scores(self) -> dict[int, float]:
        """The scores of all rollouts; waits until the last one is judged.

        Raises:
            Exception: what the function raised.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._num_left)
            if self._error is not None:
                raise self._error
            return self._scores

    def _work(self) -> None:
        while True:
            with self._changed:
                rollouts, self._waiting = self._waiting, []
                if not rollouts:
                    self._num_free += 1
                    return
            try:
                scores = score(self._function, rollouts)
            except BaseException as error:  # raised where the scores are waited for
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._scores |= zip(map(id, rollouts), scores, strict=True)
                self._num_left -= len(rollouts)
                self._changed.notify_all()


def reward_parts(scored: ScoredRollout) -> dict[str, float]:
    """The named numbers that reward functions gave beside a score."""
    named: dict[str, float] = {}
    for value in (*scored.scores_by_source.values(), scored.score):
        named |= parts_of(value)
    return named


def named_numbers(scored: ScoredRollout) -> dict[str, float]:
    """Named parts of a score as `reward/<name>`, an episode's metrics as `episode/<name>`."""
    named = {f"reward/{name}": part for name, part in reward_parts(scored).items()}
    if episode := scored.rollout.episode:
        named |= {f"episode/{name}": value for name, value in episode.metrics.items()}
    return named


def model_sources(count: int) -> list[str]:
    """Names of the reward models among the sources of a score."""
    return ["model"] if count == 1 else [f"model_{number}" for number in range(count)]
