"""Episodes of several turns, with an engine whose answers a test makes."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from transformers import AutoTokenizer

from raypo.config import ConfigError, RolloutSection
from raypo.report.samples import turns_of
from raypo.rewards.scoring import _columns
from raypo.rollout import event_loop
from raypo.rollout.batch_scoring import Scorer
from raypo.rollout.collect import Sampler, Sampling, is_trainable
from raypo.rollout.episodes import Episodes
from raypo.rollout.event_loop import LoopStandsStill
from raypo.rollout.sharding import to_experience
from raypo.run.rollout_metrics import sample_row
from raypo.serving.requests import Completion, SamplingRequest
from raypo.tools.calculator import calculator
from raypo.tools.calls import answer_calls
from raypo.types import Prompt, Rollout
from tests.chat_templates import CHAT_TEMPLATES, MARKS, TOOL_TEMPLATES
from tests.stand_ins import Engine, seed_of
from tests.tiny import tiny_tokenizer

READS_TOOLS = "{% if tools %}{{ tools[0].function.name }};{% endif %}" + CHAT_TEMPLATES["plain"]
END = 2
SIZE = 300
"""Of the vocabulary, which the embedding pads."""
HERE = "tests.unit.rollout.test_episodes"


class Counting:
    """Says how many turns there were; three are enough. A turn is worth its number."""

    def __init__(self, turns: int = 3) -> None:
        self.turns, self.turn = turns, 0

    async def reset(self, prompt: Any, label: Any) -> None:
        self.label = label

    async def step(self, action: str) -> tuple[str, float, bool]:
        self.turn += 1
        return f" {self.turn}? ", float(self.turn), self.turn == self.turns


class Blocking(Counting):
    def reset(self, prompt: Any, label: Any) -> str:  # pyright: ignore
        self.thread = threading.get_ident()
        return f"{prompt}!"

    def step(self, action: str) -> tuple[str, float, bool]:  # pyright: ignore
        assert threading.get_ident() != MAIN
        time.sleep(0.01)
        return asyncio.run(super().step(action))


WRONG: dict[str, Any] = {
    "unknown": ([5, SIZE], 1.0, False),
    "pair": ("two", 1.0),
    "nan": ("two", float("nan"), False),
    "1e39": ("two", 1e39, False),
    "nothing": (None, 0.0, False),
    "object": (object(), 0.0, False),
}
RESULT = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "abcdefghi"}


class Answering(Counting):
    """As a tool does."""

    async def step(self, action: str) -> Any:
        _, reward, done = await super().step(action)
        return RESULT, reward, done


class Unprintable(Exception):
    def __str__(self) -> str:
        raise KeyError("message")


class Panic(BaseException):
    """As pyo3's PanicException is one."""


class Naughty(Counting):
    """Does what the label says in the second turn."""

    async def step(self, action: str) -> Any:
        if self.turn == 1:
            if self.label == "raise":
                raise KeyError("no such door")
            if self.label == "exit":
                raise SystemExit(3)
            if self.label == "unprintable":
                raise Unprintable
            if self.label == "panic":
                raise Panic("of native code")
            if self.label == "hang":
                await asyncio.sleep(60)
            if self.label in WRONG:
                return WRONG[self.label]
        return await super().step(action)


class Long(Counting):
    """Has more to say at first than there is room for."""

    async def reset(self, prompt: Any, label: Any) -> Any:
        return "?" * 600


class Blocks(Counting):
    """A coroutine that blocks; or its constructor does."""

    free = threading.Event()

    def __init__(self, *, at_once: bool = False) -> None:
        super().__init__()
        if at_once:
            self.free.wait(60)

    async def step(self, action: str) -> Any:
        self.free.wait(60)


QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2"}]


class Opens(Counting):
    """Begins with what the label says."""

    async def reset(self, prompt: Any, label: Any) -> Any:
        return {"messages": QUESTION, "message": QUESTION[1], "text": "2+2", "ids": [5, 6, 7]}.get(
            label
        )


class Silent(Counting):
    """Lets the policy go on, without a word."""

    async def step(self, action: str) -> tuple[str, float, bool]:
        _, reward, done = await super().step(action)
        return "", reward, done


class Ids(Counting):
    reads_token_ids = True

    async def step(self, action: Any) -> Any:
        assert isinstance(action, list)
        return action[::-1], 1.0, True


class Telling(Counting):
    tools = (calculator,)


class Closing(Naughty):
    """Knows who was closed, and after how many turns; the label says how that goes."""

    closed: ClassVar[list[tuple[Any, int]]] = []

    async def step(self, action: str) -> Any:
        if self.label == "never":
            raise AssertionError("the first turn has no room")
        return await super().step(action)

    async def close(self) -> None:
        self.closed.append((self.label, self.turn))
        if self.label == "close":
            raise OSError("cannot be closed")
        if self.label == "slow":
            await asyncio.sleep(60)


class ClosedInAThread(Counting):
    """Its step hangs until it is closed."""

    is_closed = threading.Event()

    def step(self, action: str) -> Any:  # pyright: ignore
        self.is_closed.wait(60)

    def close(self) -> None:
        assert threading.get_ident() != MAIN
        self.is_closed.set()


class Calculating(Counting):
    """Works out by a tool what the turn was worth, and something that is wrong."""

    async def step(self, action: str) -> Any:
        answer = await super().step(action)
        expressions = [f"{self.turn}+1", "1/0"] if self.turn == 2 else []
        calls = [{"name": "calculator", "arguments": {"expression": e}} for e in expressions]
        await answer_calls(json.dumps(calls), [calculator])
        self.metrics = {"turns_squared": self.turn**2}
        return answer


class CalculatingInThread(Calculating):
    def step(self, action: str) -> Any:  # pyright: ignore
        return asyncio.run(super().step(action))


class CalculatingInVain(Calculating):
    """Fails after it has called its tools."""

    async def step(self, action: str) -> Any:
        answer = await super().step(action)
        if self.turn == 2:
            raise ValueError("the tools were of no use")
        return answer


class MeasuringWrong(Counting):
    metrics: Any = {"hits": "many"}  # noqa: RUF012


class Expecting(Counting):
    """Every action is the label."""

    async def step(self, action: str) -> Any:
        assert action == self.label, action
        return await super().step(action)


class ExpectingCalls(Expecting):
    tools = (calculator,)


MAIN = threading.get_ident()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class Talking(Engine):
    """Answers by its seed: a few random letters, most often with their end."""

    def __init__(self, ends: Sequence[int] = (END,)) -> None:
        super().__init__(self._answer)
        self.ends = ends
        self.rounds: list[list[SamplingRequest]] = []
        self.said: dict[int, np.ndarray] = {}

    def _answer(self, requests: list[SamplingRequest]) -> list[Completion]:
        self.rounds.append(requests)
        return [self._completion(request) for request in requests]

    def _completion(self, request: SamplingRequest) -> Completion:
        random = np.random.default_rng(request.seed)
        ids = random.integers(4, 40, random.integers(1, 7)).astype(np.int32)
        if random.random() < 0.7:
            ids[-1] = self.ends[seed_of(request) % len(self.ends)]
        ids = self.said[seed_of(request)] = ids[: request.max_new_tokens]
        return Completion(ids, -random.random(len(ids)).astype(np.float32), "stop", 3)


def episodes(
    tokenizer, name: str = "Counting", ends: Sequence[int] = (END,), **keys: Any
) -> Episodes:
    section = RolloutSection.model_validate(
        {"environment": f"{HERE}:{name}", "max_episode_tokens": 400, "max_new_tokens": 8} | keys
    )
    return Episodes(section, tokenizer, ends, max_tokens=500, vocabulary_size=SIZE)


def played(
    tokenizer,
    engine: Engine | None = None,
    *,
    labels: tuple[Any, ...] = (None,),
    chat: bool = False,
    samples: int = 2,
    **keys: Any,
) -> list[Rollout]:
    with closing(episodes(tokenizer, **keys)) as table:
        return played_by(tokenizer, table, engine or Talking(), samples, labels, chat=chat)


def played_by(
    tokenizer,
    table: Episodes,
    engine: Engine,
    samples: int,
    labels: tuple[Any, ...] = (None,),
    *,
    chat: bool = False,
) -> list[Rollout]:
    """Each draw has a prompt of its own."""
    messages = [{"role": "user", "content": "1+1"}] if chat else None
    draws = [
        Prompt(
            number, "1+1=", np.array([5, 6 + number], np.int32), label, messages, group_index=number
        )
        for number, label in enumerate(labels)
    ]
    sampling = Sampling(samples, 8, 1.0, 1.0, (END,), seed=7, episodes=table)
    return Sampler(engine, tokenizer, sampling).sample(draws)


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """A tokenizer to which the marks of published templates are special tokens."""
    made = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("marked")))
    made.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return made


@pytest.mark.parametrize("name", [None, *CHAT_TEMPLATES, *TOOL_TEMPLATES])
def test_the_tokens_that_are_trained_are_those_that_were_sampled(tokenizer, marked, name):
    """Whatever stands between them, and whichever mark a model ends its turn with."""
    with_tools = name in TOOL_TEMPLATES
    tokenizer = marked if with_tools else tokenizer
    tokenizer.chat_template = (CHAT_TEMPLATES | TOOL_TEMPLATES).get(name)
    marks = ("<|return|>", "<|call|>", "<|user|>", "<|observation|>") if with_tools else ()
    ends = (END, *tokenizer.convert_tokens_to_ids(list(marks)))
    engine = Talking(ends)
    keys = {"name": "Answering" if with_tools else "Counting", "ends": ends}
    rollouts = played(tokenizer, engine, labels=(1, 2, 3), chat=name is not None, **keys)
    assert [each.episode.error for each in rollouts if each.episode] == [None] * 6

    for number, each in enumerate(rollouts):
        asked = [round_[number] for round_ in engine.rounds]
        said = [engine.said[seed_of(request)] for request in asked]
        assert each.response_ids[each.response_mask].tolist() == np.concatenate(said).tolist()
        for request, ids in zip(asked, said, strict=True):  # each in its place, after what it read
            whole = np.concatenate([each.prompt_ids, each.response_ids])
            assert request.prompt_ids.tolist() == whole[: len(request.prompt_ids)].tolist()
            assert ids.tolist() == whole[len(request.prompt_ids) :][: len(ids)].tolist()
        assert len(each.log_probs) == len(each.response_ids)
        assert (each.log_probs[~each.response_mask] == 0.0).all()
        assert (each.log_probs[each.response_mask] < 0.0).all()


def test_what_the_environment_writes_is_read_and_masked(tokenizer):
    (each,) = played(tokenizer, samples=1)
    written = tokenizer.decode(each.response_ids[~each.response_mask])
    assert written == " 1?  2? "
    assert each.response_mask[[0, -1]].all()  # after the last turn nothing is appended


def test_a_turns_reward_stands_at_its_last_token(tokenizer):
    (each,) = played(tokenizer, samples=1)
    ends = np.flatnonzero(np.diff(np.append(each.response_mask, False).astype(int)) == -1)
    assert each.turn_rewards is not None
    assert np.flatnonzero(each.turn_rewards).tolist() == ends.tolist()
    assert each.turn_rewards[ends].tolist() == [1.0, 2.0, 3.0]
    assert each.episode is not None
    assert (each.episode.score, each.episode.num_turns, each.finish_reason) == (6.0, 3, "stop")
    (scored,) = Scorer(None, (), {}).score([each])
    assert (scored.score, scored.scores_by_source) == (6.0, {"episode": 6.0})


def test_turns_are_told_apart_where_an_environment_writes_nothing(tokenizer):
    engine = Talking()
    (each,) = played(tokenizer, engine, name="Silent", samples=1)
    assert each.response_mask.all()
    assert each.turn_index is not None
    said = [engine.said[seed_of(request)] for (request,) in engine.rounds]
    numbers = [number for number, ids in enumerate(said) for _ in ids]
    assert each.turn_index.tolist() == numbers
    dealt = [replace(each, score=6.0)]
    experience = to_experience(dealt)
    assert experience.turn_index is not None
    assert experience.turn_index.tolist() == [numbers]
    row = {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in sample_row(dealt[0]).items()
    }
    shown = turns_of(row, tokenizer.backend_tokenizer)
    assert [turn.text for turn in shown] == [tokenizer.decode(ids) for ids in said]
    assert [turn.reward for turn in shown] == [1.0, 2.0, 3.0]


def test_episodes_go_in_step_and_depend_on_no_other(tokenizer):
    engine = Talking()
    together = played(tokenizer, engine, labels=(1, 2, 3))
    assert [len(round_) for round_ in engine.rounds] == [6, 6, 6]
    seeds = {request.seed for round_ in engine.rounds for request in round_}
    assert len(seeds) == 18

    alone = played(tokenizer, labels=(1,))
    assert [r.response_ids.tolist() for r in alone] == [
        r.response_ids.tolist() for r in together[:2]
    ]


def test_plain_methods_run_in_threads_beside_each_other(tokenizer):
    begin = time.perf_counter()
    rollouts = played(tokenizer, labels=tuple(range(40)), name="Blocking")
    assert time.perf_counter() - begin < 40 * 2 * 3 * 0.01
    assert {r.episode.score for r in rollouts if r.episode} == {6.0}
    assert {r.prompt for r in rollouts} == {"1+1=!"}
    assert tokenizer.decode(rollouts[0].prompt_ids) == "1+1=!"


def test_rollouts_have_the_messages_that_the_policy_has_read(tokenizer, monkeypatch):
    """For judges, reward functions and reward models: not those of the row, if reset has others."""
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATES["plain"])
    labels = ("messages", "message", "text", "ids", "nothing")
    rollouts = played(tokenizer, name="Opens", labels=labels, chat=True, samples=1)
    row = [{"role": "user", "content": "1+1"}]
    assert [each.messages for each in rollouts] == [QUESTION, *[QUESTION[1:]] * 2, None, row]
    assert rollouts[0].prompt.count("2+2") == 1
    assert _columns(lambda prompts: prompts, rollouts)["prompts"][:2] == [QUESTION, QUESTION[1:]]
    rollouts = played(tokenizer, name="Opens", labels=("messages", "text", "ids"), samples=1)
    assert [each.messages for each in rollouts] == [QUESTION, None, None]


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("raise", "KeyError: 'no such door'"),
        ("exit", "SystemExit: 3"),
        ("panic", "Panic: of native code"),
        ("unprintable", "Unprintable: its message is not available"),
        ("unknown", "ValueError: prompt_ids: 300 is not in the policy's vocabulary (0 to 299)"),
        ("hang", "TimeoutError: step gave no answer in 0.2 s (rollout.step_timeout_s)"),
        ("pair", "WrongAnswer: step returned ('two', 1.0), not (observation, reward, done)"),
        ("nan", "WrongAnswer: step returned the reward nan, not a finite number"),
        ("1e39", "WrongAnswer: step returned the reward 1e+39, not a finite number"),
        ("nothing", "WrongAnswer: step returned no observation, but the episode is not done"),
        ("object", "ValueError: an observation must be a text, a chat message, a list"),
    ],
)
def test_what_fails_fails_alone(tokenizer, label, reason):
    rollouts = played(tokenizer, labels=("good", label, "good"), name="Naughty", step_timeout_s=0.2)
    scored = Scorer(None, (), {}).score(rollouts)
    assert [is_trainable(each) for each in scored] == [True, True, False, False, True, True]
    for each in rollouts[2:4]:
        assert each.episode is not None
        assert (each.episode.error or "").startswith(reason)
        assert each.num_sampled  # what was said before is there to be looked at


def test_environments_are_closed_however_their_episode_ends(tokenizer):
    Closing.closed.clear()
    labels = ("good", "raise", "hang", "limit", "close", "slow")
    rollouts = played(
        tokenizer,
        labels=labels,
        name="Closing",
        step_timeout_s=0.2,
        max_turns=2,
        samples=1,
        environment_args={"turns": 2},
    )
    turns = {"raise": 1, "hang": 1}
    assert sorted(Closing.closed) == sorted((label, turns.get(label, 2)) for label in labels)
    errors = dict(
        zip(labels, (each.episode.error for each in rollouts if each.episode), strict=True)
    )
    assert (errors["good"], errors["limit"]) == (None, None)
    error = errors["raise"] or ""  # and not what closing says
    assert re.fullmatch(r"KeyError: 'no such door' \(File .*test_episodes.py\", .*in step\)", error)
    assert (errors["close"] or "").startswith("OSError: cannot be closed (File ")
    assert errors["slow"] == "TimeoutError: close gave no answer in 0.2 s (rollout.step_timeout_s)"


def test_a_thread_that_hangs_is_left_behind_and_a_plain_close_can_end_it(tokenizer):
    (each,) = played(tokenizer, name="ClosedInAThread", step_timeout_s=0.2, samples=1)
    assert ClosedInAThread.is_closed.is_set()
    assert each.episode is not None
    assert (each.episode.error or "").startswith("TimeoutError: step gave no answer")


def test_an_episode_without_room_for_a_turn_has_failed(tokenizer):
    (each,) = played(tokenizer, name="Long", samples=1)
    assert each.episode is not None
    assert each.episode.error == (
        "EpisodeLimit: after 600 tokens, 0 of them after the prompt, there is no room for "
        "another turn: a conversation may have 500 tokens (data.max_prompt_tokens and "
        "rollout.max_episode_tokens), of which 400 after the prompt "
        "(rollout.max_episode_tokens)"
    )


@pytest.mark.parametrize("arguments", [{}, {"at_once": True}])
def test_a_coroutine_that_blocks_all_episodes_ends_the_run(tokenizer, monkeypatch, arguments):
    monkeypatch.setattr(event_loop, "STANDS_STILL_S", 0.2)
    Blocks.free.clear()
    with pytest.raises(LoopStandsStill, match=r"test_episodes.py, line \d+, in .*free\.wait"):
        played(tokenizer, name="Blocks", step_timeout_s=0.2, environment_args=arguments)
    Blocks.free.set()


def test_no_more_turns_than_there_may_be(tokenizer):
    (each,) = played(tokenizer, samples=1, max_turns=2)
    assert each.episode is not None
    assert (each.episode.num_turns, each.episode.score) == (2, 3.0)
    assert each.finish_reason == "length"
    assert each.response_mask[-1]


class CutOff(Talking):
    """Cuts off the second turn."""

    def _completion(self, request: SamplingRequest) -> Completion:
        completion = super()._completion(request)
        return replace(completion, finish_reason="length") if len(self.rounds) == 2 else completion


@pytest.mark.parametrize(("name", "reason"), [("Counting", "length"), ("Silent", "stop")])
def test_an_episode_with_a_turn_that_is_cut_off_and_not_continued_counts_as_cut_off(
    tokenizer, name, reason
):
    (each,) = played(tokenizer, CutOff(), samples=1, name=name)
    assert each.episode is not None
    assert (each.episode.num_turns, each.finish_reason) == (3, reason)


@pytest.mark.parametrize("limit", range(8, 40, 4))
def test_an_episode_is_never_longer_than_it_may_be(tokenizer, limit):
    rollouts = played(
        tokenizer,
        labels=tuple(range(4)),
        max_episode_tokens=limit,
        max_turns=99,
        environment_args={"turns": 99},
    )
    assert max(len(each.response_ids) for each in rollouts) <= limit
    assert {each.finish_reason for each in rollouts} == {"length"}


def test_environments_may_speak_in_token_ids(tokenizer):
    engine = Talking()
    (each,) = played(tokenizer, engine, samples=1, name="Ids", environment_args={})
    assert each.episode is not None
    assert each.episode.score == 1.0


def test_the_chat_template_is_told_of_an_environments_tools(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", READS_TOOLS)
    engine = Talking()
    played(tokenizer, engine, chat=True, samples=1, name="Telling")
    for (request,) in engine.rounds:
        read = tokenizer.decode(request.prompt_ids)
        assert read.startswith("calculator;user: 1+1")
        assert read.count("calculator") == 1


@pytest.mark.parametrize(
    ("name", "processes"),
    [("Calculating", 0), ("CalculatingInThread", 0), ("Calculating", 1)],
)
def test_uses_of_tools_and_what_an_environment_measures_are_recorded(tokenizer, name, processes):
    keys = {"name": name, "environment_processes": processes}
    both = played(tokenizer, labels=(1,), samples=2, **keys)
    for each in both:
        assert each.episode is not None
        assert each.episode.metrics == {"turns_squared": 9.0}
        assert [(use.name, use.error, use.turn) for use in each.episode.tool_uses] == [
            ("calculator", None, 2),
            ("calculator", "division by zero", 2),
        ]


@pytest.mark.parametrize("processes", [0, 1])
def test_uses_of_tools_are_recorded_also_where_the_turn_fails(tokenizer, processes):
    keys = {"name": "CalculatingInVain", "environment_processes": processes}
    (each,) = played(tokenizer, labels=(1,), samples=1, **keys)
    assert each.episode is not None
    assert (each.episode.error or "").startswith("ValueError: the tools were of no use (File ")
    assert [use.error for use in each.episode.tool_uses] == [None, "division by zero"]


def test_metrics_that_are_no_numbers_fail_their_episode(tokenizer):
    (each,) = played(tokenizer, samples=1, name="MeasuringWrong")
    assert each.episode is not None
    assert each.episode.error == (
        "WrongAnswer: metrics is {'hits': 'many'}, not a mapping of names to finite numbers"
    )


@pytest.mark.parametrize(
    ("name", "action"), [("Expecting", "hi"), ("ExpectingCalls", "<unk>hi")], ids=["none", "tools"]
)
def test_marks_that_are_special_tokens_are_seen_where_tools_may_be_called(
    tokenizer, monkeypatch, name, action
):
    monkeypatch.setattr(tokenizer, "chat_template", READS_TOOLS)
    ids = np.array(tokenizer.encode("<unk>hi<eos>"), np.int32)
    says_so = Completion(ids, np.zeros(len(ids), np.float32), "stop", 3)
    engine = Engine(lambda requests: [says_so] * len(requests))
    keys = {"samples": 1, "chat": True, "name": name}
    (each,) = played(tokenizer, engine, labels=(action,), **keys)
    assert each.episode is not None
    assert each.episode.error is None


def test_tools_that_the_template_ignores_end_the_run_before_its_start(tokenizer, monkeypatch):
    for template in CHAT_TEMPLATES.values():
        monkeypatch.setattr(tokenizer, "chat_template", template)
        with pytest.raises(ConfigError, match="does not describe tools") as error:
            episodes(tokenizer, "ExpectingCalls")
        assert str(error.value).startswith(f"rollout.environment ({HERE}:ExpectingCalls): ")


def test_tools_that_the_policy_is_never_told_of_fail_the_episode(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", READS_TOOLS)
    (each,) = played(tokenizer, samples=1, name="ExpectingCalls")
    assert each.episode is not None
    assert each.episode.error is not None
    assert each.episode.error.startswith("WrongAnswer: the environment has tools, which")
