"""When turns are sampled: in step or each by itself, by which engine, under which weights."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from raypo.cluster.actors import NoReplicaLeft
from raypo.concurrency import background_future, daemon_future
from raypo.rollout.engines import PolicyEngines, Pushes
from raypo.rollout.session import Session
from raypo.serving.client import Completions
from raypo.serving.requests import Completion, SamplingRequest
from raypo.types import Rollout
from tests.stand_ins import seed_of
from tests.tiny import tiny_tokenizer
from tests.unit.rollout import test_agents, test_episodes
from tests.unit.rollout.test_episodes import Counting, Talking

WAYS = ("in_step", "continuous")


class Slow(Counting):
    """Thinks long in its first step, where the label says so."""

    async def step(self, action: str) -> tuple[str, float, bool]:
        if self.label == "slow" and self.turn == 0:
            await asyncio.sleep(0.5)
        return await super().step(action)


class Ragged(Counting):
    """As many turns as the label says."""

    async def reset(self, prompt: Any, label: Any) -> None:
        self.turns = label


class Plain(Counting):
    def reset(self, prompt: Any, label: Any) -> None:  # pyright: ignore
        pass

    def step(self, action: str) -> tuple[str, float, bool]:  # pyright: ignore
        self.turn += 1
        time.sleep(0.001)
        return "?", 1.0, self.turn == self.turns


class Joined(Talking):
    """Answers calls that join after some milliseconds; knows how many threads there were."""

    most_threads = 0

    def submit(self, requests: Sequence[SamplingRequest], on_completion: Any = None) -> Completions:
        (request,) = requests
        return background_future(self.joined(request))

    async def joined(self, request: SamplingRequest) -> list[Completion]:
        await asyncio.sleep(0.001 * (seed_of(request) % 7))
        self.most_threads = max(self.most_threads, threading.active_count())
        return self._answer([request])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def played(tokenizer, name: str, engine: Talking, way: str, **keys: Any) -> list[Rollout]:
    environment = f"{__name__}:{name}"
    return test_episodes.played(
        tokenizer, engine, **{"environment": environment, "turns": way, "samples": 1} | keys
    )


def ids(rollouts: list[Rollout]) -> list[list[int]]:
    return [each.response_ids.tolist() for each in rollouts]


def turns(each: Rollout) -> list[list[int]]:
    """Of the policy, what it sampled in each."""
    edges = np.flatnonzero(np.diff(each.response_mask, prepend=False, append=False))
    return [each.response_ids[a:b].tolist() for a, b in zip(edges[::2], edges[1::2], strict=True)]


def asked_by(engine: Talking, each: Rollout) -> list[SamplingRequest]:
    """The requests of an episode, of rollouts whose prompts differ."""
    asked = [request for round_ in engine.rounds for request in round_]
    whole = [*each.prompt_ids.tolist(), *each.response_ids.tolist()]
    return [r for r in asked if r.prompt_ids.tolist() == whole[: len(r.prompt_ids)]]


def test_an_episode_that_thinks_long_delays_no_other(tokenizer):
    labels = ("slow", "fast", "fast")
    engine = Joined()
    rollouts = played(tokenizer, "Slow", engine, "continuous", labels=labels)
    order = [round_[0].seed for round_ in engine.rounds]
    slow, *fast = [[order.index(r.seed) for r in asked_by(engine, each)] for each in rollouts]
    assert max(map(max, fast)) < slow[1]

    in_step = Joined()
    again = played(tokenizer, "Slow", in_step, "in_step", labels=labels)
    assert [len(round_) for round_ in in_step.rounds] == [3, 3, 3]
    assert ids(again) == ids(rollouts)


@pytest.mark.parametrize("way", WAYS)
def test_episodes_of_any_number_of_turns_train_what_they_sampled(tokenizer, way):
    labels = tuple(np.random.default_rng(1).integers(1, 9, 40).tolist())
    engine = Joined()
    rollouts = played(
        tokenizer, "Ragged", engine, way, labels=labels, max_turns=9, max_episode_tokens=400
    )
    assert [each.episode.num_turns for each in rollouts if each.episode] == list(labels)
    for each in rollouts:
        said = [engine.said[seed_of(request)].tolist() for request in asked_by(engine, each)]
        assert turns(each) == said
        written = each.response_ids[~each.response_mask]
        assert len(written) == 4 * (len(said) - 1)


class Changing(Joined):
    """New weights come with every round, or every third answer, and in the middle of answers."""

    def _completion(self, request: SamplingRequest) -> Completion:
        plain = super()._completion(request)
        version = len(self.rounds) // (1 if len(self.rounds[0]) > 1 else 3)
        middle = len(plain.token_ids) // 2
        later = ((middle, version + 1),) if middle else ()
        self.versions[seed_of(request)] = [version] * (middle or len(plain.token_ids))
        self.versions[seed_of(request)] += (
            [version + 1] * (len(plain.token_ids) - middle) if middle else []
        )
        return Completion(plain.token_ids, plain.log_probs, "stop", version, later)

    def __init__(self) -> None:
        super().__init__()
        self.versions: dict[int, list[int]] = {}
        """By seed, of each token."""


@pytest.mark.parametrize("way", WAYS)
def test_each_token_knows_the_version_of_its_weights_over_all_turns(tokenizer, way):
    engine = Changing()
    rollouts = played(tokenizer, "Counting", engine, way, labels=(1, 2, 3))
    for each in rollouts:
        known = [v for request in asked_by(engine, each) for v in engine.versions[seed_of(request)]]
        assert each.weight_versions[each.response_mask].tolist() == known
    assert max(each.weight_versions.max() for each in rollouts) > 2


class Several(Joined):
    """Three engines of one worker."""

    def __init__(self) -> None:
        super().__init__()
        self.each = [Joined() for _ in range(3)]

    def per_engine(self) -> list[Any]:
        return list(self.each)


@pytest.mark.parametrize("way", WAYS)
def test_an_episode_stays_with_its_engine_and_groups_stay_together(tokenizer, way):
    engine = Several()
    rollouts = played(tokenizer, "Ragged", engine, way, labels=(3, 5, 1, 4, 2, 2), samples=2)
    first_asked = []
    for each in rollouts:
        having = [number for number, one in enumerate(engine.each) if asked_by(one, each)]
        assert len(having) == 1
        asked = {request.seed for request in asked_by(engine.each[having[0]], each)}
        assert len(asked) >= len(turns(each))
        first_asked += having
    assert first_asked == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("way", "lost_at"), [("in_step", 0), ("in_step", 2), ("continuous", 0), ("continuous", 6)]
)
def test_an_engine_that_is_lost_in_the_middle_costs_no_episode(tokenizer, way, lost_at):
    class Lost(Joined):
        is_pushed = False

        def _answer(self, requests: list[SamplingRequest]) -> list[Completion]:
            if len(self.rounds) >= lost_at and not self.is_pushed:
                raise NoReplicaLeft("nobody")
            return super()._answer(requests)

        def push(self) -> None:
            self.is_pushed = True

    labels = (3, 1, 4, 2)
    whole = played(tokenizer, "Ragged", Joined(), "in_step", labels=labels)
    engine = Lost()
    pushes = Pushes()
    engines: Any = PolicyEngines(engine, pushes)  # type: ignore[arg-type]
    episodes = daemon_future(
        lambda: played(tokenizer, "Ragged", engines, way, labels=labels), name="controller"
    )
    while not pushes.wait_for(episodes, may_push=True):
        with pushes.push():
            engine.push()
    assert engine.is_pushed
    assert ids(episodes.result()) == ids(whole)

    with pytest.raises(NoReplicaLeft, match="nobody"):
        played(tokenizer, "Ragged", Lost(), way, labels=labels)


class Leaves:
    """Has two turns sampled at a time, and does not wait for the second."""

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        asked = [asyncio.create_task(policy.generate(prompt)) for _ in range(2)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        if label == "fails":
            raise OSError("no such tool")
        if label == "cancels":
            asked[1].cancel()
            await policy.generate(prompt)
        return 1.0


@pytest.mark.parametrize("label", ["returns", "fails", "cancels"])
def test_a_turn_that_nobody_waits_for_is_not_sampled_to_its_end(tokenizer, label):
    class Endless(Joined):
        """Of its second response."""

        num_asked, is_withdrawn = 0, threading.Event()

        async def joined(self, request: SamplingRequest) -> list[Completion]:
            self.num_asked += 1
            if self.num_asked == 2:
                try:
                    await asyncio.sleep(30)
                except asyncio.CancelledError:
                    self.is_withdrawn.set()
                    raise
            return await super().joined(request)

    engine = Endless()
    rollouts = test_agents.played(
        tokenizer, "Leaves", engine, labels=(label,), samples=1, turns="continuous", at=__name__
    )
    assert engine.is_withdrawn.wait(10)  # by another thread's event loop
    assert len(rollouts) == len(engine.rounds) == (2 if label == "cancels" else 1)
    assert ids(rollouts) == [engine.said[seed_of(lot[0])].tolist() for lot in engine.rounds]
    episode = rollouts[0].episode
    assert episode is not None
    if label == "fails":
        assert str(episode.error).startswith("OSError: no such tool (File ")
    else:
        assert episode.error is None


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_fails_otherwise_ends_the_run(tokenizer, way):
    class Broken(Joined):
        def _answer(self, requests: list[SamplingRequest]) -> list[Completion]:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        played(tokenizer, "Counting", Broken(), way)


def test_plain_methods_have_no_more_threads_than_the_quota(tokenizer):
    engine, before = Joined(), threading.active_count()
    rollouts = played(
        tokenizer, "Plain", engine, "continuous", samples=500, max_concurrent_steps=20
    )
    assert {each.episode.score for each in rollouts if each.episode} == {3.0}
    assert before + 5 < engine.most_threads <= before + 20 + 10  # not 500


class Crowded(Counting):
    """Knows how many of it step at a time."""

    at_work, most, guard = 0, 0, threading.Lock()

    async def step(self, action: str) -> tuple[str, float, bool]:
        Crowded.at_work += 1
        Crowded.most = max(Crowded.most, Crowded.at_work)
        await asyncio.sleep(0.002)
        Crowded.at_work -= 1
        return await super().step(action)


def test_the_quota_is_of_the_worker_however_many_batches_are_played_at_a_time(tokenizer):
    keys = {"environment": f"{__name__}:Crowded", "turns": "continuous", "max_concurrent_steps": 5}
    table = test_episodes.episodes(tokenizer, **keys)
    plays = [
        threading.Thread(target=test_episodes.played_by, args=(tokenizer, table, Joined(), 40))
        for _ in range(3)
    ]
    Crowded.most = 0
    for play in plays:
        play.start()
    for play in plays:
        play.join()
    table.close()
    assert Crowded.most == 5
