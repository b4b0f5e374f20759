"""Score rollouts with a reward function, reward models, reward servers or a judge, or with several.

Concurrency. Reward models and the reference model run in replicas; a call to them returns a future.
A reward function with worker processes is called from threads, at most one for each process. The
reward servers have one thread, and so has a judge on servers. A free thread takes all rollouts
that wait. A reward function that runs in this process, and a judge that the run deploys, are called
once, with the whole batch, after sampling.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from raypo.concurrency import daemon_future
from raypo.config import RewardSection, SampledModelSection
from raypo.rewards.scoring import LARGEST, FailedScore, RewardFunction, parts_of, score, texts_of
from raypo.types import Rollout, RolloutKey

FUNCTION, URL, JUDGE, EPISODE = "function", "url", "judge", "episode"


class RewardModel(Protocol):
    """Interface of a reward model for scoring. `RewardModelClient` implements it."""

    def score(self, rollouts: list[Rollout]) -> Future[list[float]]:
        """Return a future of one score for each rollout, in the order given."""
        ...


class Reference(Protocol):
    """Interface of a reference model for scoring. `ReferenceClient` implements it."""

    def log_probs(self, rollouts: list[Rollout]) -> Future[list[np.ndarray]]:
        """Return a future of the log-probs of each response's tokens in nats, float32 [T]."""
        ...


@dataclass(frozen=True)
class Scorer:
    """Sources of the score with their weights, and the reference model."""

    function: RewardFunction | None
    models: tuple[RewardModel, ...]
    """Reward models in the order of `model.reward`."""
    weights: dict[str, float]
    """Weight of each source: `function`, `url`, `judge`, and `model` or `model_0`, `model_1`, ...
    The score of an episode always has weight 1."""
    servers: Mapping[str, RewardFunction] = field(default_factory=dict)
    """Functions that call servers, by source: `url` and `judge`."""
    judge: RewardFunction | None = None
    """Function that calls the judge which the run deploys. Its answers must not depend on the order
    in which samples arrive, so it gets the whole batch."""
    processes: int = 0
    """Worker processes of the reward function. 0 calls it in this process with the whole batch."""
    reference: Reference | None = None
    """Reference model. None means that no reference log-probs are computed."""
    models_apart: bool = False
    """True if reward and reference models share no cores or devices with the engines."""

    def score(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Score a whole batch and compute its reference log-probs. All sources run concurrently."""
        return Scoring(self).results(rollouts)

    def total(self, by_source: Mapping[str, float]) -> float:
        """Return the score to train on: the sources' weighted sum.

        It is NaN if any source failed, or if float32 cannot hold it.
        """
        sums = math.fsum(self.weights.get(name, 1.0) * value for name, value in by_source.items())
        return sums if abs(sums) <= LARGEST else math.nan

    def model_total(self, by_source: Mapping[str, float]) -> float:
        """Return the weighted sum of the reward models' scores."""
        others = (FUNCTION, URL, JUDGE, EPISODE)
        rest = {name: value for name, value in by_source.items() if name not in others}
        return self.total(rest)


class Scoring:
    """Scores and reference log-probs of one batch.

    Some sources do not compete with the engines for cores or devices: a function with worker
    processes, servers, and models with devices of their own. These sources score a draw as soon as
    all of its rollouts are sampled, while other draws are still in flight. A model with devices of
    its own gets one call for each draw, so that its rounding does not depend on the order of
    arrival.
    """

    def __init__(self, scorer: Scorer) -> None:
        """Create the queues of the sources. Nothing is scored yet."""
        self._scorer = scorer
        self._early: dict[str, _FunctionQueue] = {}
        self._at_the_end: dict[str, _FunctionQueue] = {}
        if scorer.function is not None:
            queues = self._early if scorer.processes else self._at_the_end
            queues[FUNCTION] = _FunctionQueue(scorer.function, scorer.processes or 1)
        for name, servers in scorer.servers.items():
            self._early[name] = _FunctionQueue(servers, 1)
        if scorer.judge is not None:
            self._at_the_end[JUDGE] = _FunctionQueue(scorer.judge, 1)
        self._model_calls: list[_ModelCalls] = []
        self._added: set[int] = set()
        """Indices of the draws whose rollouts were added."""
        self._lock = threading.Lock()

    @property
    def scores_early(self) -> bool:
        """True if any source scores draws before the whole batch is sampled."""
        has_models = bool(self._scorer.models) or self._scorer.reference is not None
        return bool(self._early) or (self._scorer.models_apart and has_models)

    def add(self, rollouts: list[Rollout]) -> None:
        """Add all rollouts of some draws. Any thread may call this; a repeated draw is ignored."""
        by_draw: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            by_draw.setdefault(rollout.group_index, []).append(rollout)
        with self._lock:
            new = [of_draw for draw, of_draw in by_draw.items() if draw not in self._added]
            for of_draw in new if self._scorer.models_apart else ():
                self._call_models(of_draw)  # an error is raised by `results`
            for queue in self._early.values():
                queue.add([rollout for of_draw in new for rollout in of_draw])
            self._added |= by_draw.keys()

    def results(self, rollouts: list[Rollout]) -> list[Rollout]:
        """Score all rollouts of the batch, wait for the results, and return them in order.

        Args:
            rollouts: The whole batch, including the rollouts that were already added.

        Raises:
            Exception: the error that a source raised.
        """
        if not rollouts:
            return []
        self.add(rollouts)
        for queue in self._at_the_end.values():
            queue.add(rollouts)
        if not self._scorer.models_apart:
            self._call_models(rollouts)
        queues = {name: queue.scores() for name, queue in (self._at_the_end | self._early).items()}
        by_model: dict[RolloutKey, dict[str, float]] = {}
        log_probs: dict[RolloutKey, np.ndarray | None] = {}
        for calls in self._model_calls:
            keys = [rollout.key for rollout in calls.rollouts]
            rows = calls.reference.result() if calls.reference else [None] * len(keys)
            log_probs |= zip(keys, rows, strict=True)
            for name, call in zip(model_sources(len(calls.models)), calls.models, strict=True):
                for key, value in zip(keys, call.result(), strict=True):
                    by_model.setdefault(key, {})[name] = value
        return [
            self._result(
                rollout,
                {name: scores[key] for name, scores in queues.items()} | by_model.get(key, {}),
                log_probs[key],
            )
            for rollout, key in ((rollout, rollout.key) for rollout in rollouts)
        ]

    def _result(
        self, rollout: Rollout, by_source: dict[str, float], log_probs: np.ndarray | None
    ) -> Rollout:
        if (episode := rollout.episode) is not None:
            by_source[EPISODE] = FailedScore(episode.error) if episode.error else episode.score
        return replace(
            rollout,
            score=self._scorer.total(by_source),
            scores_by_source=by_source,
            ref_log_probs=log_probs,
        )

    def _call_models(self, rollouts: list[Rollout]) -> None:
        scorer = self._scorer
        reference = scorer.reference.log_probs(rollouts) if scorer.reference else None
        models = [model.score(rollouts) for model in scorer.models]
        self._model_calls.append(_ModelCalls(rollouts, reference, models))


@dataclass(frozen=True)
class _ModelCalls:
    """Pending calls of the reference model and the reward models for some rollouts."""

    rollouts: list[Rollout]
    reference: Future[list[np.ndarray]] | None
    models: list[Future[list[float]]]


class _FunctionQueue:
    """Queue of rollouts for a reward function. A free caller takes all rollouts that wait."""

    def __init__(self, function: RewardFunction, num_callers: int) -> None:
        self._function, self._num_free = function, num_callers
        self._waiting: list[Rollout] = []
        self._num_left = 0
        self._scores: dict[RolloutKey, float] = {}
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def add(self, rollouts: list[Rollout]) -> None:
        """Add rollouts; start a thread if a caller is free."""
        with self._changed:
            self._waiting += rollouts
            self._num_left += len(rollouts)
            if self._num_free:
                self._num_free -= 1
                daemon_future(self._work, name="raypo-scores")

    def scores(self) -> dict[RolloutKey, float]:
        """Wait for the scores of all rollouts, and return them.

        Raises:
            Exception: the error that the function raised.
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
            except BaseException as error:  # raised by `scores`
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._scores |= zip([rollout.key for rollout in rollouts], scores, strict=True)
                self._num_left -= len(rollouts)
                self._changed.notify_all()


def reward_parts(scored: Rollout) -> dict[str, float]:
    """Return the named numbers that reward functions returned together with a score."""
    named: dict[str, float] = {}
    for value in (*scored.scores_by_source.values(), scored.score):
        named |= parts_of(value)
    return named


def reward_texts(scored: Rollout) -> dict[str, str]:
    """Return the named texts that reward functions, such as a judge, returned with a score."""
    named: dict[str, str] = {}
    for value in (*scored.scores_by_source.values(), scored.score):
        named |= texts_of(value)
    return named


def named_numbers(scored: Rollout) -> dict[str, float]:
    """Return a score's parts as `reward/<name>`, and an episode's metrics as `episode/<name>`."""
    named = {f"reward/{name}": part for name, part in reward_parts(scored).items()}
    if episode := scored.episode:
        named |= {f"episode/{name}": value for name, value in episode.metrics.items()}
    return named


def source_weights(reward: RewardSection, model: SampledModelSection) -> dict[str, float]:
    """Return the weight of each source of a config's score."""
    entries, weights = model.reward or (), reward.weights
    names = model_sources(len(entries))
    return {FUNCTION: weights.function, URL: weights.url, JUDGE: weights.judge} | {
        name: weights.model * entry.weight for name, entry in zip(names, entries, strict=True)
    }


def model_sources(count: int) -> list[str]:
    """Return the source names of `count` reward models: `model`, or `model_0`, `model_1`, ..."""
    return ["model"] if count == 1 else [f"model_{number}" for number in range(count)]
