"""Environments of the package verifiers: found by name, played token for token, and scored."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from examples.verifiers_game import make_data
from raypo.checks.input_checks import check_inputs
from raypo.collectives import Workers
from raypo.config import ConfigError, PPOConfig, RolloutSection
from raypo.data.rows import read_rows
from raypo.data.turns import TurnTokens
from raypo.data.verifiers_environment import check_verifiers, load_verifiers
from raypo.rewards.scoring import parts_of
from raypo.rollout.batch_scoring import Scorer
from raypo.rollout.collect import Sampler, Sampling
from raypo.rollout.episodes import Episodes
from raypo.run.online_inputs import OnlineInputs
from raypo.run.rollout_metrics import rollout_metrics
from raypo.run.run import Run
from raypo.run.setup import Runtime
from raypo.serving.requests import Completion, SamplingRequest
from raypo.storage.run_files import RunFiles
from raypo.types import Prompt, Rollout
from tests.chat_templates import CHAT_TEMPLATES
from tests.stand_ins import Engine, seed_of
from tests.tiny import tiny_tokenizer
from tests.unit.rollout.test_episodes import END, SIZE, Talking
from tests.unit.rollout.test_sessions import CALL, TEMPLATE, Calling
from tests.unit.run.test_few_prompts import Said

pytest.importorskip("verifiers", reason="the package verifiers is optional: raypo[verifiers]")

HIGHER = 13
"""Token of `>` in the example's vocabulary; 3 to 10 are the numbers."""
GAME = str(Path(__file__).parents[3] / "examples/verifiers_game/higher_lower.py")
OWN = '''
import asyncio
import verifiers as vf
from datasets import Dataset

class Env(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "and then?"}]

def long(completion):
    return float(len(completion[-1].content))

async def raises(state):
    raise KeyError("no such label")

async def hangs(state):
    await asyncio.sleep(60)

def together(states):
    return [0.0] * len(states)

def add(a: int) -> str:
    """Adds.

    Args:
        a: A number.
    """
    return str(a + 1)

def load_environment(turns=2, reward="long", tools=False, **more):
    rows = [{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2", "info": {"a": 1}}]
    if tools:
        rubric = vf.Rubric(funcs=[long])
        return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[add], rubric=rubric)
    rubric = vf.RubricGroup([vf.Rubric(funcs=[globals()[reward]], weights=[0.5])])
    return Env(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=turns, **more)
'''


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("environments") / "own_environment.py"
    file.write_text(OWN)
    return str(file)


def played(tokenizer, name: str, engine: Talking, *, samples: int = 2, **keys: Any):
    section = RolloutSection.model_validate(
        {
            "environment": f"verifiers:{name}",
            "max_episode_tokens": 300,
            "max_new_tokens": 8,
            "step_timeout_s": 30,
        }
        | keys
    )
    messages = [{"role": "user", "content": "1+1"}]
    text, ids = TurnTokens(tokenizer, [END]).first(messages, chat=True)
    draws = [Prompt(0, text, ids, "2", messages, row={"answer": "2"}, group_index=0)]
    episodes = Episodes(section, tokenizer, [END], max_tokens=400, vocabulary_size=SIZE)
    sampling = Sampling(samples, 8, 1.0, 1.0, (END,), seed=7, episodes=episodes)
    with closing(episodes):
        return Sampler(engine, tokenizer, sampling).sample(draws)


@pytest.mark.parametrize("template", CHAT_TEMPLATES)
def test_an_episode_is_one_row_of_what_was_sampled(tokenizer, own, template):
    tokenizer.chat_template = CHAT_TEMPLATES[template]
    engine = Talking()
    rollouts = played(tokenizer, own, engine, environment_args={"turns": 3})
    assert [each.row_index for each in rollouts] == [0, 0]
    assert len(engine.rounds) == 3
    for each in rollouts:
        seeds = [seed_of(request) for round_ in engine.rounds for request in round_]
        said = [ids for seed in seeds for ids in engine.said[seed].tolist()]
        assert each.episode is not None
        assert each.episode.error is None
        assert each.episode.num_turns == 3
        assert "and then?" in tokenizer.decode(each.response_ids[~each.response_mask])
        assert set(each.response_ids[each.response_mask].tolist()) <= set(said)
    # Nothing that was sampled is lost, or in two rows.
    sampled = sum(int(each.response_mask.sum()) for each in rollouts)
    assert sampled == sum(len(ids) for ids in engine.said.values())


class Silent(Talking):
    """Ends each turn before its first word."""

    def _completion(self, request: SamplingRequest) -> Completion:
        ids = self.said[seed_of(request)] = np.array([END], np.int32)
        return Completion(ids, np.zeros(1, np.float32), "stop", 3)


def test_an_episode_goes_on_after_an_empty_turn(tokenizer, own):
    tokenizer.chat_template = next(iter(CHAT_TEMPLATES.values()))
    for each in scores_of(played(tokenizer, own, Silent())):
        assert each.episode.error is None
        assert (each.episode.num_turns, each.row_index) == (2, 0)
        assert each.response_ids[each.response_mask].tolist() == [END, END]
        assert each.score == 0.0


def test_tools_of_an_environment_are_called_within_one_row(tokenizer, own):
    tokenizer.chat_template = TEMPLATE
    engine = Calling(tokenizer)
    played_ones = played(tokenizer, own, engine, samples=1, environment_args={"tools": True})
    (rollout,) = scores_of(played_ones)
    assert rollout.episode.error is None
    assert (rollout.episode.num_turns, rollout.row_index) == (2, 0)
    assert rollout.prompt.startswith("tools: ")
    assert "Adds." in rollout.prompt
    said = tokenizer.decode(rollout.response_ids[rollout.response_mask])
    assert said == f"{CALL}<eos>yes<eos>"
    assert tokenizer.decode(rollout.response_ids[~rollout.response_mask]) == "tool: 2assistant: "
    assert parts_of(rollout.scores_by_source["episode"])["total_tool_calls"] == 1.0


def scores_of(rollouts: list[Rollout]) -> Any:
    return Scorer(None, (), {}).score(rollouts)


def test_the_rubric_is_the_score_and_its_functions_are_parts(tokenizer, own):
    tokenizer.chat_template = next(iter(CHAT_TEMPLATES.values()))
    scored = scores_of(played(tokenizer, own, Talking()))
    for each in scored:
        parts = parts_of(each.scores_by_source["episode"])
        assert parts["num_turns"] == 2.0
        assert each.score == 0.5 * parts["long"] > 0.0
        assert each.turn_rewards is None
    figures = rollout_metrics(scored)
    assert figures["reward/long"] == 2 * figures["rollout/score_mean"]


def test_a_limit_of_the_run_ends_an_episode_that_the_rubric_scores(tokenizer, own):
    tokenizer.chat_template = next(iter(CHAT_TEMPLATES.values()))
    for each in scores_of(played(tokenizer, own, Talking(), max_turns=1)):
        assert each.episode.num_turns == 1
        assert each.finish_reason == "length"
        assert parts_of(each.scores_by_source["episode"])["num_turns"] == 1.0
        assert each.score > 0.0


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"environment_args": {"reward": "raises"}}, "KeyError: 'no such label'"),
        (
            {"environment_args": {"reward": "hangs"}, "step_timeout_s": 0.2},
            "TimeoutError: run gave",
        ),
        ({"max_episode_tokens": 1, "max_new_tokens": 1, "max_turns": 1}, None),
    ],
)
def test_what_goes_wrong_fails_its_episode(tokenizer, own, keys, error):
    tokenizer.chat_template = next(iter(CHAT_TEMPLATES.values()))
    for each in played(tokenizer, own, Talking(), **keys):
        assert each.episode is not None
        assert (each.episode.error or "").startswith(error or "")
        assert (each.episode.error is None) == (error is None)


class Halving(Engine):
    """Plays the game of the example by halving what is left, as token ids of its model."""

    def __init__(self) -> None:
        super().__init__(lambda requests: [self._completion(each) for each in requests])

    def _completion(self, request: SamplingRequest) -> Completion:
        low, high = 0, 7
        tokens = request.prompt_ids.tolist()[1:]  # after the question
        for guess, answer in zip(tokens[::2], tokens[1::2], strict=True):
            low, high = (guess - 2, high) if answer == HIGHER else (low, guess - 4)
        ids = np.array([(low + high) // 2 + 3], np.int32)
        return Completion(ids, np.zeros(1, np.float32), "length", 1)


def test_the_example_loads_and_is_played(tmp_path: Path):
    make_data.main(tmp_path)
    policy = str(tmp_path / "policy")
    config = PPOConfig.load(Path(GAME).parent / "ppo.yaml", [f"model.policy={policy}"])
    check_inputs(config)
    runtime = Runtime(name="game", storage_path=str(tmp_path), working_dir=str(tmp_path))
    files = RunFiles(str(tmp_path), "game")
    with ExitStack() as at_end:
        run = Run(config, runtime, Workers(), files, Said(), at_end=at_end)
        inputs = OnlineInputs.load(run)
        assert inputs.rollouts is not None
        draws = inputs.rollouts.source.draw(8)
        rollouts = Sampler(Halving(), inputs.tokenizer, inputs.rollouts.sampling).sample(draws)
        scored = scores_of(rollouts)
    assert {each.episode.error for each in scored} == {None}
    assert len(scored) == 8 * 16
    figures = rollout_metrics(scored)
    assert figures["reward/found"] == 7 / 8
    assert figures["reward/numbers"] == 1.0
    assert figures["rollout/score_mean"] == pytest.approx(7 / 8 + 0.1)
    assert {each.row_index for each in scored} == {0}


def test_rows_are_those_of_the_environment(own):
    (row,) = read_rows(f"verifiers://{own}?turns=4", key="data.prompts")
    assert row.values["prompt"] == [{"role": "user", "content": "1+1"}]
    assert (row.values["answer"], row.values["info"]["a"]) == ("2", 1)
    held_out = list(read_rows(f"verifiers://{GAME}?split=eval&most=2", key="eval.prompts"))
    assert [each.values["answer"] for each in held_out] == list("01234567")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("no-such-env", {}, r"rollout\.environment \(no_such_env:load_environment\): there is no"),
        ("{own}x.py", {}, "there is no file"),
        (GAME, {"lives": 3}, r"rollout\.environment_args \(\{'lives': 3\}\): .* cannot be made"),
    ],
)
def test_an_environment_that_is_not_there_is_refused(own, name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        check_verifiers(name.format(own=own), arguments, key="rollout.environment")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"message_type": "completion"}, "its message_type is completion"),
        ({"reward": "together"}, "scores all episodes of a group together"),
        ({"reward": "nothing"}, "KeyError: 'nothing'"),
    ],
)
@pytest.mark.filterwarnings("ignore:message_type is deprecated")
def test_an_environment_that_cannot_train_is_refused(tokenizer, own, arguments, message):
    with pytest.raises(ConfigError, match=message):
        played(tokenizer, own, Talking(), environment_args=arguments)


@pytest.mark.parametrize("installed", ["0.1.13", "0.4.0", "1.0.0.dev0"])
def test_other_versions_are_refused(monkeypatch, own, installed):
    monkeypatch.setattr("raypo.data.verifiers_environment.version", lambda _: installed)
    with pytest.raises(ConfigError, match=rf"{installed} is installed, but only 0\.1\.14 to"):
        load_verifiers(own, {}, key="rollout.environment")
