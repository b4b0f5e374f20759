"""Agents: free control flow, and every token that they had sampled in one row or another."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from raypo.config import RolloutSection
from raypo.data.turns import TurnTokens
from raypo.rollout.collect import Sampler, Sampling
from raypo.rollout.episodes import Episodes
from raypo.rollout.policy import EpisodeLimit
from raypo.rollout.session import Session
from raypo.serving.requests import Completion, SamplingRequest
from raypo.tools.calculator import calculator
from raypo.tools.calls import answer_calls
from raypo.types import Prompt, Rollout
from tests.stand_ins import seed_of
from tests.tiny import tiny_tokenizer
from tests.unit.rollout.test_episodes import END, SIZE, Talking

WRONG_USE = '{"name": "calculator", "arguments": {}}'


class Chats:
    """Two turns of one conversation, as messages."""

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        first = await policy.generate(prompt)
        messages = [*prompt, first.message, {"role": "user", "content": "and then?"}]
        await policy.generate(messages)
        return 2.0


class Splits:
    """Three ways on from one turn, at the same time; the score is how many tokens the last had."""

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        first = await policy.generate(prompt)
        ways = [prompt + first.text + way for way in "abc"]
        replies = await asyncio.gather(*map(policy.generate, ways))
        return float(len(replies[-1].token_ids))


class Asks:
    """What its keys say, twice: the first reply's text is gone on with."""

    def __init__(self, more: str = "", **keys: Any) -> None:
        self.more, self.keys = more, keys

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        reply = await policy.generate(prompt, **self.keys)
        await policy.generate(prompt + reply.text + self.more, **self.keys)
        return 1.0


class Routes:
    """A word to choose by, and then the answer; neither is ended by the policy itself."""

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        await policy.generate(prompt, max_new_tokens=1)
        await policy.generate([7, 8, 9])
        return 1.0


class Races:
    """Returns when the first of its branches is done; the other asks when the episode is over."""

    asks: asyncio.Task[Any]

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        if label == "stays":
            for _ in range(3):
                await policy.generate(prompt)
                await asyncio.sleep(0.05)
            return 1.0
        first, Races.asks = [
            asyncio.create_task(each)
            for each in (policy.generate(prompt), self._goes_on(prompt, policy))
        ]
        await asyncio.wait((first, Races.asks), return_when=asyncio.FIRST_COMPLETED)
        return 1.0

    async def _goes_on(self, prompt: Any, policy: Session) -> None:
        await policy.generate(prompt)
        await asyncio.sleep(0.01)
        await policy.generate(prompt)


class Measures:
    """A tool between its two calls, and what it counted."""

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        self.metrics = {"tokens": 0}
        for _ in range(2):
            reply = await policy.generate(prompt)
            self.metrics["tokens"] += len(reply.token_ids)
            if policy.num_calls == 1:
                await asyncio.gather(answer_calls(WRONG_USE, [calculator]))
        return 1.0


class MeasuresInThread(Measures):
    def run(self, prompt: Any, label: Any, policy: Session) -> float:  # pyright: ignore
        self.metrics = {"tokens": 0}
        asyncio.run(answer_calls(WRONG_USE, [calculator]))
        return 1.0


class Naughty:
    async def run(self, prompt: Any, label: Any, policy: Session) -> Any:
        await policy.generate(prompt)
        if label == "raise":
            raise KeyError("no such tool")
        if label == "hang":
            await asyncio.sleep(60)
        if label == "unknown":
            await policy.generate([SIZE])
        if label == "none":
            return None
        while label == "talk":
            await policy.generate(prompt)
        return 1.0


class Talks:
    """Until its limit, which it does not know of; the label says how."""

    closed = 0

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        self.metrics = {"most": policy.settings.section.max_turns}
        try:
            async with asyncio.TaskGroup() as group:
                while label == "in a group":
                    await group.create_task(policy.generate(prompt))
            while label != "wrong":
                await policy.generate(prompt)
            await policy.generate(prompt)
        except EpisodeLimit as error:
            if label == "wrapped":
                raise RuntimeError("the agent could not go on") from error
            raise
        raise KeyError("its own")

    async def close(self) -> None:
        Talks.closed += 1


class Crowded:
    """Knows how many of it work at a time; asks the policy twice at a time."""

    at_work, most = 0, 0

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        for _ in range(2):
            Crowded.at_work += 1
            Crowded.most = max(Crowded.most, Crowded.at_work)
            await asyncio.sleep(0.005)
            Crowded.at_work -= 1
            await asyncio.gather(policy.generate(prompt), policy.generate(prompt))
        return 1.0


class Careful:
    async def run(self, prompt: Any, label: Any, policy: Session) -> Any:
        turns = 0.0
        try:
            while True:
                await policy.generate(prompt)
                turns += 1
        except EpisodeLimit:
            return turns


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def played(
    tokenizer,
    name: str,
    engine: Talking | None = None,
    *,
    labels: tuple[Any, ...] = (None,),
    chat: bool = False,
    samples: int = 2,
    temperature: float = 1.0,
    max_tokens: int = 400,
    at: str = __name__,
    **keys: Any,
) -> list[Rollout]:
    section = RolloutSection.model_validate(
        {"agent": f"{at}:{name}", "max_episode_tokens": 300, "max_new_tokens": 8} | keys
    )
    messages = [{"role": "user", "content": "1+1"}] if chat else None
    text, ids = TurnTokens(tokenizer, [END]).first(messages or "1+1=", chat=chat)
    draws = [Prompt(n, text, ids, label, messages, group_index=n) for n, label in enumerate(labels)]
    episodes = Episodes(section, tokenizer, [END], max_tokens=max_tokens, vocabulary_size=SIZE)
    sampling = Sampling(samples, 8, temperature, 1.0, (END,), seed=7, episodes=episodes)
    with closing(episodes):
        return Sampler(engine or Talking(), tokenizer, sampling).sample(draws)


def test_ways_that_part_are_rows_of_one_sample_and_each_token_is_trained_once(tokenizer):
    engine = Talking()
    rollouts = played(tokenizer, "Splits", engine, samples=1)
    assert [len(round_) for round_ in engine.rounds] == [1, 3]
    assert [each.row_index for each in rollouts] == [0, 1, 2]
    first, ways = engine.rounds[0][0], engine.rounds[1]
    sampled = [engine.said[seed_of(request)].tolist() for request in (first, *ways)]
    trained = [each.response_ids[each.response_mask].tolist() for each in rollouts]
    assert trained == [sampled[0] + sampled[1], sampled[2], sampled[3]]
    shared = [*first.prompt_ids.tolist(), *sampled[0]]
    for each in rollouts[1:]:
        assert each.prompt_ids[: len(shared)].tolist() == shared
    assert all(each.episode == rollouts[0].episode for each in rollouts)


class Says(Talking):
    """Certain ids, one answer after the other."""

    def __init__(self, *answers: list[int], reason: str = "stop") -> None:
        super().__init__()
        self.answers_left, self.reason = list(answers), reason

    def _completion(self, request: SamplingRequest) -> Completion:
        ids = np.array(self.answers_left.pop(0), np.int32)
        self.said[seed_of(request)] = ids
        return Completion(ids, np.zeros(len(ids), np.float32), self.reason, 3)


def test_a_prompt_that_is_asked_again_after_an_empty_reply_begins_anew(tokenizer):
    """Its words are those of the reply's conversation, whose ids have an end behind them."""
    engine = Says([END], [7, END])
    first, second = played(tokenizer, "Asks", engine, samples=1)
    assert [each.prompt_ids.tolist() for each in (first, second)] == [
        engine.rounds[0][0].prompt_ids.tolist()
    ] * 2
    assert (first.response_ids.tolist(), second.response_ids.tolist()) == ([END], [7, END])


def test_a_reply_that_has_ended_is_not_sampled_on_from_behind_its_end(tokenizer):
    engine = Says([7, END], [8, END])
    _, second = played(tokenizer, "Asks", engine, samples=1)
    assert second.prompt_ids.tolist() == [*engine.rounds[0][0].prompt_ids.tolist(), 7]


def test_a_reply_that_was_cut_off_goes_on_in_its_row(tokenizer):
    (each,) = played(tokenizer, "Asks", Says([7, 8], [9, END], reason="length"), samples=1)
    assert each.response_ids.tolist() == [7, 8, 9, END]
    assert each.response_mask.all()


@pytest.mark.parametrize("stop", ["~", ["~", "?"]])
def test_a_turn_may_be_shorter_and_end_at_texts_of_its_own(tokenizer, stop):
    engine = Talking()
    arguments = {"more": "~", "max_new_tokens": 3, "stop": stop}
    played(tokenizer, "Asks", engine, samples=1, agent_args=arguments)
    for (request,) in engine.rounds:
        assert (request.max_new_tokens, request.stop) == (3, tuple(stop))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens (0): must be at least 1."),
        (
            {"stop": ["~", ""]},
            "stop (['~', '']): stop strings must not be empty texts, and need an engine ",
        ),
        (
            {"stop": ["~", 3]},
            "stop (['~', 3]): stop strings must not be empty texts, and need an engine ",
        ),
    ],
)
def test_what_no_engine_takes_fails_its_episode_alone(tokenizer, arguments, error):
    (each,) = played(tokenizer, "Asks", samples=1, agent_args=arguments)
    assert each.episode is not None
    assert (each.episode.error or "").startswith(f"ValueError: {error}")


def test_a_call_of_an_episode_that_is_over_is_refused(tokenizer):
    engine = Talking()
    rollouts = played(tokenizer, "Races", engine, labels=("races", "stays"), samples=1)
    assert [len(round_) for round_ in engine.rounds] == [3, 1, 1]
    assert [each.episode.score for each in rollouts if each.episode] == [1.0] * len(rollouts)
    assert isinstance(error := Races.asks.exception(), EpisodeLimit)
    assert str(error) == "the episode is over"


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("raise", "KeyError: 'no such tool'"),
        ("hang", "TimeoutError: run gave no answer in 0.2 s (rollout.step_timeout_s)"),
        ("unknown", "ValueError: prompt_ids: 300 is not in the policy's vocabulary (0 to 299)"),
        ("none", "WrongAnswer: run returned None, not a finite number"),
        ("talk", "EpisodeLimit"),
    ],
)
def test_an_agent_that_fails_fails_alone(tokenizer, label, reason):
    begin = time.perf_counter()
    rollouts = played(
        tokenizer, "Naughty", labels=("good", label), step_timeout_s=0.2, samples=1, max_turns=4
    )
    assert time.perf_counter() - begin < 5
    good, *bad = rollouts
    assert good.episode is not None
    assert good.episode.error is None
    assert bad
    assert all(each.episode and (each.episode.error or "").startswith(reason) for each in bad)


def test_an_agent_may_go_on_until_its_limit(tokenizer):
    rollouts = played(tokenizer, "Careful", samples=1, max_turns=5)
    assert {each.episode.score for each in rollouts if each.episode} == {5.0}


def test_only_a_turn_that_the_runs_own_limit_ends_is_cut_off(tokenizer):
    asked, answered = played(tokenizer, "Routes", Says([7], [9] * 8, reason="length"), samples=1)
    assert (asked.finish_reason, answered.finish_reason) == ("stop", "length")


@pytest.mark.parametrize("label", ["plain", "wrapped", "in a group"])
def test_an_agent_that_meets_its_limit_fails_or_has_the_score_that_is_set(tokenizer, label):
    failed = played(tokenizer, "Talks", labels=(label,), samples=1, max_turns=3)
    assert all(each.episode and each.episode.error for each in failed)
    Talks.closed = 0
    rows = played(tokenizer, "Talks", labels=(label,), samples=1, max_turns=3, limit_score=-0.5)
    assert Talks.closed == 1
    for each in rows:
        assert each.episode is not None
        assert (each.episode.score, each.episode.error) == (-0.5, None)
        assert each.episode.metrics == {"most": 3.0}
        assert each.finish_reason == "length"


def test_a_limit_score_hides_no_other_error(tokenizer):
    (each,) = played(tokenizer, "Talks", labels=("wrong",), samples=1, limit_score=0.0)
    assert each.episode is not None
    assert (each.episode.error or "").startswith("KeyError: 'its own' (File ")
    (each,) = played(tokenizer, "Talks", samples=1, limit_score=0.0, max_tokens=4)
    assert each.episode is not None  # not a single turn had room
    assert (each.episode.error or "").startswith("EpisodeLimit: after 4 tokens")


@pytest.mark.parametrize("way", ["in_step", "continuous"])
def test_no_more_agents_work_at_a_time_than_the_quota_admits(tokenizer, way):
    Crowded.most = 0
    keys = {"max_concurrent_steps": 3, "turns": way}
    rollouts = played(tokenizer, "Crowded", labels=tuple(range(20)), samples=1, **keys)
    assert {each.episode.num_turns for each in rollouts if each.episode} == {4}
    assert Crowded.most == 3


@pytest.mark.parametrize(("name", "turn"), [("Measures", 1), ("MeasuresInThread", 0)])
def test_uses_of_tools_and_what_an_agent_measures_are_recorded(tokenizer, name, turn):
    rollouts = played(tokenizer, name)
    for each in rollouts:
        assert each.episode is not None
        (use,) = each.episode.tool_uses
        assert (use.name, use.turn) == ("calculator", turn)
        assert use.error == "calculator: expression: Missing required argument"
    for number in {each.sample_index for each in rollouts}:
        mine = [each for each in rollouts if each.sample_index == number]
        assert mine[0].episode is not None
        assert mine[0].episode.metrics == {"tokens": sum(each.num_sampled for each in mine)}
