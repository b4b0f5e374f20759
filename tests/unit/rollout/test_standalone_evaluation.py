"""Evaluation of a model without a run: the score of the run, and metrics of several sources."""

import json
import math
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypo.config import ConfigError, PPOConfig
from raypo.deployment.handle import local_handle
from raypo.rollout import standalone_evaluation
from raypo.rollout.standalone_evaluation import evaluate_model
from raypo.serving.client import EngineClient
from raypo.types import Episode, Prompt, Rollout
from tests.tiny import tiny_policy
from tests.unit.rollout.test_step_batch import rollout
from tests.unit.test_known_bugs import Served

FUNCTIONS = """
def half(rollouts):
    return [0.5] * len(rollouts)

def given(rollouts):  # null in the label: the sample cannot be scored
    return [None if each.label is None else float(each.label) for each in rollouts]
"""


class Quarter:
    """Play episodes of one turn, each with the score 0.25."""

    def play(self, draws: Sequence[Prompt], *_: Any) -> list[Rollout]:
        episode = Episode(0.25, 1, 0.0)
        return [replace(rollout(draw.group_index, 0, 3), episode=episode) for draw in draws]

    def close(self) -> None:
        pass


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a policy, functions and prompts; the engine answers all prompts alike."""

    @contextmanager
    def engine(*_: Any) -> Any:
        yield EngineClient(local_handle(Served()))

    monkeypatch.setattr(standalone_evaluation, "_engine_of", engine)
    monkeypatch.chdir(tmp_path)
    tiny_policy(tmp_path / "policy")
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    write_prompts(tmp_path / "a.jsonl", 0.0)
    return tmp_path


def write_prompts(path: Path, *labels: float | None) -> None:
    rows = [{"prompt": "1+1=", "label": label} for label in labels]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def config_of(*paths: str, **sections: Any) -> PPOConfig:
    return PPOConfig.parse(
        {
            "name": "x",
            "model": {"policy": "policy", **sections.pop("model", {})},
            "data": {"prompts": "a.jsonl", "label_key": "label"},
            "eval": {"prompts": list(paths), **sections.pop("eval", {})},
            **sections,
        }
    )


def episodes_of(**sections: Any) -> PPOConfig:
    rollouts = {"environment": "game.py:Game", "max_episode_tokens": 64}
    return config_of("a.jsonl", rollout=rollouts, **sections)


def evaluated(config: PPOConfig) -> dict[str, dict[str, float]]:
    return evaluate_model("policy", config, lambda _: None)


def test_the_score_of_episodes_is_that_of_the_run(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(standalone_evaluation, "open_episodes", lambda *_: Quarter())
    reward = {"function": "functions.py:half", "weights": {"function": 3.0}, "processes": 2}
    for sections, expected in (
        ({}, 0.25),
        ({"reward": reward}, 0.25 + 3.0 * 0.5),
        ({"reward": reward, "eval": {"function": "functions.py:half"}}, 0.5),
    ):
        metrics = evaluated(episodes_of(**sections))["a.jsonl"]
        assert metrics["eval/score_mean"] == expected


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("model.reward", {"model": {"reward": "judge"}}),
        ("reward.url", {"reward": {"url": "http://127.0.0.1:1/score"}}),
        ("reward.judge", {"reward": {"judge": {"path": "judge", "template": "{response}"}}}),
    ],
)
def test_models_and_servers_that_the_run_adds_to_a_score_are_refused(
    folder: Path, key: str, sections: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(standalone_evaluation, "open_episodes", lambda *_: Quarter())
    with pytest.raises(ConfigError, match=rf"{key} \(.*\): is part of the run's score"):
        evaluated(episodes_of(**sections))
    own = {**sections, "eval": {"function": "functions.py:half"}}
    assert evaluated(episodes_of(**own))["a.jsonl"]["eval/score_mean"] == 0.5


def test_all_sources_together_have_the_mean_over_scored_samples(folder: Path):
    write_prompts(folder / "a.jsonl", None, None, None, 1.0)
    write_prompts(folder / "b.jsonl", 0.0, 1.0, 0.0, 0.0)
    write_prompts(folder / "c.jsonl", None)
    function = {"function": "functions.py:given", "pass_at": [1]}
    results = evaluated(config_of("a.jsonl", "b.jsonl", "c.jsonl", eval=function))
    assert list(results) == ["a.jsonl", "b.jsonl", "c.jsonl", "all"]
    assert math.isnan(results["c.jsonl"]["eval/score_mean"])
    assert results["all"] == {
        "eval/failed": 4.0,
        "eval/pass_at_1": 2 / 5,
        "eval/prompts": 9.0,
        "eval/response_tokens_mean": 3.0,
        "eval/score_mean": 2 / 5,
    }


def test_one_source_has_no_line_of_all_sources(folder: Path):
    assert list(evaluated(config_of("a.jsonl", eval={"function": "functions.py:half"}))) == [
        "a.jsonl"
    ]
