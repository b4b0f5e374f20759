"""What episodes cost beside the sampling of their turns, with 256 of them at a time.

    pytest -m benchmark tests/benchmarks/test_environment_overhead.py -s

The environment and the agents answer at once, so all that is measured is raypo's and the client's.
The same requests, round by round, straight to the engine are what it is compared with. Where
episodes are ragged and environments take their time, going on in step is compared with going on by
oneself.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from raypo.config import EngineSection, RolloutSection
from raypo.deployment.handle import local_handle
from raypo.models.loading import vocabulary_size
from raypo.rollout.collect import Sampler, Sampling, request_of
from raypo.rollout.engines import PolicyEngines
from raypo.rollout.episodes import Episodes
from raypo.rollout.session import Session
from raypo.serving.client import EngineClient
from raypo.serving.engine import Engine
from raypo.serving.requests import SamplingRequest
from raypo.types import Prompt, Rollout
from tests import stand_ins
from tests.stand_ins import generate, local_push, pack
from tests.tiny import tiny_policy

EPISODES, TURNS, NEW_TOKENS = 256, 3, 24
ROUNDS = 3
MOST = 0.05
"""Of the time that the engine alone takes. By HTTP there is no bound: most is the client's."""
OBSERVATION = " and then? "
PROMPT = Prompt(0, "12+34=", np.arange(4, 24, dtype=np.int32), None, None, group_index=0)


class Again:
    def __init__(self) -> None:
        self.left = TURNS

    async def reset(self, prompt: Any, label: Any) -> None:
        return None

    async def step(self, action: str) -> tuple[str, float, bool]:
        self.left -= 1
        return OBSERVATION, 1.0, self.left == 0


class InThreads(Again):
    def reset(self, prompt: Any, label: Any) -> None:  # pyright: ignore
        return None

    def step(self, action: str) -> tuple[str, float, bool]:  # pyright: ignore
        self.left -= 1
        return OBSERVATION, 1.0, self.left == 0


class Ragged(Again):
    """One to eight turns, most of them few; each is answered after a while, some after long."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.delay_s = delay_s

    async def reset(self, prompt: Any, label: Any) -> None:
        self.random = random.Random(label)
        self.left = min(8, 1 + int(self.random.expovariate(0.4)))

    async def step(self, action: str) -> tuple[str, float, bool]:
        await asyncio.sleep(self.random.expovariate(1 / self.delay_s) if self.delay_s else 0.0)
        return await super().step(action)


class Generates:
    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        ids = PROMPT.token_ids
        for _ in range(TURNS):
            ids = (await policy.generate(ids)).conversation
        return 1.0


class AsksByHttp:
    """As most are written: a client of its own for each episode."""

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        async with openai.AsyncOpenAI(base_url=policy.base_url, api_key=policy.api_key) as client:
            await chat(client)
        return 1.0


class SharesAClient:
    """One client of the openai package for all episodes of a step."""

    client: openai.AsyncOpenAI | None = None

    async def run(self, prompt: Any, label: Any, policy: Session) -> float:
        whole = SharesAClient.client or openai.AsyncOpenAI(base_url=policy.base_url, api_key="none")
        SharesAClient.client = whole
        await chat(whole.with_options(api_key=policy.api_key))
        return 1.0


async def chat(client: openai.AsyncOpenAI) -> None:
    text = PROMPT.text
    for _ in range(TURNS):
        answer = await client.completions.create(model="any", prompt=text)
        text += answer.choices[0].text + OBSERVATION


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_policy(tmp_path_factory.mktemp("m"), hidden=512, layers=8, head_dim=64))


@pytest.fixture(scope="module")
def engine(folder: str) -> Iterator[Engine]:
    section = EngineSection(kv_cache_gb=1.0)
    started = Engine(folder, section=section, dtype="float32", max_model_len=256)
    model = AutoModelForCausalLM.from_pretrained(folder)
    named = ((name, p.detach()) for name, p in model.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        started.load_weights(local_push(pack(named, bucket_bytes=10**8), version=1))
    yield started
    started.shutdown()


def episodes(folder: str, name: str, **keys: Any) -> Episodes:
    """No token ends a turn, so all have the same length."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    kind = "environment" if issubclass(globals()[name], Again) else "agent"
    section = RolloutSection.model_validate(
        {kind: f"{__name__}:{name}", "max_episode_tokens": 200, "max_new_tokens": NEW_TOKENS} | keys
    )
    size = vocabulary_size(folder)
    return Episodes(section, tokenizer, [], max_tokens=256, vocabulary_size=size)


@pytest.mark.parametrize("name", ["Again", "InThreads", "Generates", "AsksByHttp", "SharesAClient"])
def test_the_cost_of_episodes(engine: Engine, folder: str, name: str):
    played = episodes(folder, name)
    rounds: list[list[SamplingRequest]] = []
    seeds = itertools.count()

    def recording(requests: list[SamplingRequest]) -> Any:
        rounds.append(requests)
        return generate(engine, requests)

    def as_episodes() -> None:
        rounds.clear()
        SharesAClient.client = None
        sampling = Sampling(EPISODES, NEW_TOKENS, 1.0, 1.0, (), next(seeds), episodes=played)
        rollouts = Sampler(stand_ins.Engine(recording), None, sampling).sample([PROMPT])  # pyright: ignore
        assert len(rounds) == TURNS
        assert sum(each.num_sampled for each in rollouts) == EPISODES * TURNS * NEW_TOKENS

    def by_the_engine_alone() -> None:
        for requests in rounds:
            generate(engine, requests)

    def in_one_turn() -> None:
        sampling = Sampling(EPISODES, TURNS * NEW_TOKENS, 1.0, 1.0, (), next(seeds))
        generate(engine, [request_of(PROMPT, n, sampling) for n in range(EPISODES)])

    ways: dict[str, Callable[[], None]] = {
        "episodes": as_episodes,
        "the same requests": by_the_engine_alone,
        "one turn": in_one_turn,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS + 1):  # in turns, as the machine's load changes; the first warms up
        for way, work in ways.items():
            begin = time.perf_counter()
            work()
            seconds[way].append(time.perf_counter() - begin)
    played.close()
    took = {way: min(each[1:]) for way, each in seconds.items()}
    more = took["episodes"] / took["the same requests"] - 1.0
    whole, one_turn = took["the same requests"], took["one turn"]
    print(f"\n{name}: {more:+.1%} of {whole:.2f} s; {one_turn:.2f} s in one turn")
    assert more <= MOST or name in ("AsksByHttp", "SharesAClient")


@pytest.mark.parametrize("delay_s", [0.0, 0.3, 1.0])
def test_going_on_by_oneself(engine: Engine, folder: str, delay_s: float):
    """Seconds of a batch whose episodes have different lengths and think for different times."""
    prompts = [
        Prompt(n, PROMPT.text, PROMPT.token_ids, label, None, group_index=n)
        for n, label in enumerate(range(64))
    ]
    keys = {"environment_args": {"delay_s": delay_s}, "max_new_tokens": 16}
    seconds: dict[str, list[float]] = {"in_step": [], "continuous": []}
    waited: dict[str, list[float]] = {way: [] for way in seconds}
    seeds, local = itertools.count(), PolicyEngines(EngineClient(local_handle(engine)))
    rollouts: list[Rollout] = []
    for _ in range(ROUNDS + 1):
        for way in seconds:
            with closing(episodes(folder, "Ragged", turns=way, **keys)) as played:
                sampling = Sampling(4, 16, 1.0, 1.0, (), next(seeds), episodes=played)
                begin = time.perf_counter()
                rollouts = Sampler(local, None, sampling).sample(prompts)  # pyright: ignore
                seconds[way].append(time.perf_counter() - begin)
                waited[way].append(played.waited_s())
            assert all(each.episode and each.episode.error is None for each in rollouts)
    took = {way: min(each[1:]) for way, each in seconds.items()}
    ratio = took["in_step"] / took["continuous"]
    turns = sum(each.episode.num_turns for each in rollouts if each.episode) / len(rollouts)
    print(
        f"\n{turns:.1f} turns on average, {delay_s:g} s to think: in step {took['in_step']:.1f} s "
        f"(of which waited {min(waited['in_step'][1:]):.1f} s), continuous "
        f"{took['continuous']:.1f} s: {ratio:.2f} times as fast"
    )
    assert ratio > (1.3 if delay_s else 0.9)
