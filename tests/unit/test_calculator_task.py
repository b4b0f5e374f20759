"""The calculator example: its environment, its chats, its run files; a slow test trains it."""

import asyncio
import json
import random
from pathlib import Path

import numpy as np
import pytest

from examples.calculator.environment import ToolUser
from examples.calculator.make_data import (
    CLOSE,
    OPEN,
    conversation,
    draw_task,
    make_tokenizer,
    question,
)
from raypo import PPOConfig, SFTConfig
from raypo.config import ResponsesSection
from raypo.data.conversations import conversation as tokenised
from raypo.data.rows import BadRows, Row
from raypo.data.stop_tokens import StopTokens
from raypo.data.turns import TurnTokens

CALCULATOR = Path(__file__).parents[2] / "examples" / "calculator"
CALL = f"{OPEN}57*83{CLOSE}"


def episode(*actions: str, **arguments):
    """What each action is answered with."""

    async def play():
        environment = ToolUser(call_cost=0.25, **arguments)
        assert await environment.reset(question("57*83"), "4731") is None
        return [await environment.step(action) for action in actions]

    return asyncio.run(play())


def test_a_call_is_answered_and_costs_and_the_answer_is_judged():
    told, end = episode(CALL, "4731")
    assert told == ([{"role": "tool", "content": "4731"}], -0.25, False)
    assert end == (None, 1.0, True)


def test_an_answer_without_a_call_costs_nothing():
    assert episode("4731") == [(None, 1.0, True)]
    assert episode("4730") == [(None, 0.0, True)]


def test_a_silent_calculator_costs_as_much():
    assert episode(CALL, silent=True) == [([{"role": "tool", "content": ""}], -0.25, False)]


@pytest.mark.parametrize("wrong", [OPEN, f"{OPEN}57*{CLOSE}", f"{OPEN}1{CLOSE}{OPEN}"])
def test_a_wrong_call_is_told_so_and_costs(wrong):
    messages, reward, done = episode(wrong)[0]
    assert messages is not None
    (message,) = messages
    assert message["role"] == "tool"
    assert message["content"].startswith("error: ")
    assert (reward, done) == (-0.25, False)


@pytest.mark.parametrize("calls", [False, True])
def test_what_is_learned_is_token_for_token_what_episodes_look_like(calls):
    tokenizer = make_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<eos>")
    assert isinstance(end, int)
    turns = TurnTokens(tokenizer, [end])
    messages = conversation("57*83", calls=calls)

    _, prompt = turns.first(messages[0:1], chat=True)
    response: list[int] = []
    mask: list[bool] = []
    for place, message in enumerate(messages[1:], start=1):
        if message["role"] == "assistant":
            ids = [*tokenizer(message["content"])["input_ids"], end]
        else:
            ids = turns.between(np.array(response), messages[place : place + 1], chat=True)
        response += [int(each) for each in ids]
        mask += [message["role"] == "assistant"] * len(ids)

    row = Row("here", {"messages": messages})
    section = ResponsesSection(prompts=("here",), messages_key="messages")
    learned = tokenised(row, section, tokenizer, StopTokens(tokenizer, [end]), BadRows("refuse"))
    assert learned.prompt_ids.tolist() == prompt.tolist()
    assert learned.response_ids.tolist() == response
    kept = np.ones(len(mask), bool) if learned.mask is None else learned.mask
    assert kept.tolist() == mask


def test_tasks_fit_the_run_files():
    tokenizer = make_tokenizer()
    sft = SFTConfig.load(CALCULATOR / "sft.yaml")
    ppo = PPOConfig.load(CALCULATOR / "ppo.yaml")
    assert ppo.model.policy == f"runs/{sft.name}/policy"
    assert ppo.rollout.max_turns == 2
    generator = random.Random(0)
    for task in (draw_task(generator) for _ in range(200)):
        ids = tokenizer(f"{task}=")["input_ids"]
        assert tokenizer.decode(ids) == f"{task}="
        assert len(ids) <= ppo.data.max_prompt_tokens
        call, told, answer = conversation(task, calls=True)[1:]
        turns = [len(tokenizer(m["content"])["input_ids"]) + 1 for m in (call, answer)]
        assert max(turns) <= ppo.rollout.max_new_tokens
        whole = sum(turns) + len(tokenizer(told["content"])["input_ids"]) + 2
        assert whole <= (ppo.rollout.max_episode_tokens or 0)
        assert whole <= sft.data.max_response_tokens


def test_tasks_are_sums_to_know_and_products_to_work_out():
    tasks = [draw_task(random.Random(seed)) for seed in range(400)]
    sums = {task for task in tasks if "+" in task}
    assert all(len(task) == 3 for task in sums)
    assert 0.4 < len([task for task in tasks if "+" in task]) / 400 < 0.6
    assert all(len(task) == 5 for task in set(tasks) - sums)
    assert json.loads(f"{CALL}".split(">")[1].split("<")[0])["arguments"] == {"expression": "57*83"}
