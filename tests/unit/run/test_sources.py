"""What runs make of several sources with weights, before anything starts."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raypo.collectives import Workers
from raypo.config import PPOConfig, SFTConfig
from raypo.data.examples import load_examples
from raypo.recipes.on_examples import Examples
from raypo.run.online_inputs import OnlineInputs
from raypo.run.rollout_metrics import rollout_metrics, sample_row
from raypo.run.run import Run
from raypo.run.services import Services
from raypo.run.setup import Runtime
from raypo.storage.run_files import RunFiles
from tests.rollouts import plain_rollout
from tests.tiny import tiny_policy
from tests.unit.data.prompt_files import save_to_disk, write
from tests.unit.run.test_few_prompts import Said

NO_SERVICES = Services(None, {})  # type: ignore[arg-type]
ROWS = [{"prompt": f"{number}+1=", "response": str(number + 1)} for number in range(9)]


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """A file with weight 3 that is smaller than its share of a step, and a folder with weight 1."""
    (tmp_path / "judges.py").write_text("def fives(rollouts):\n    return [5.0] * len(rollouts)\n")
    few = write(tmp_path / "few.jsonl", ROWS[:5])
    many = save_to_disk(tmp_path / "many", ROWS)
    return {
        "name": "run",
        "storage_path": str(tmp_path),
        "model": {"policy": str(tiny_policy(tmp_path / "policy"))},
        "data": {"prompts": [{"path": few, "weight": 3}, {"path": many, "weight": 1}]},
    }


def prepared(kind: Any, config: Any) -> tuple[Any, list[str]]:
    said, place = Said(), config.storage_path
    files = RunFiles(place, "run")
    runtime = Runtime(name="run", storage_path=place, working_dir=place)
    return kind(Run(config, runtime, Workers(), files, said)), said.messages


def test_prompts_come_by_their_weights_and_are_judged_by_their_source(values: dict[str, Any]):
    second = values["data"]["prompts"][1]
    second["function"] = f"{values['storage_path']}/judges.py:fives"
    values |= {
        "reward": {"function": "raypo.rewards.verifiers:thinking_format"},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 1},
        "ppo": {"minibatch_size": 8},
    }
    config = PPOConfig.parse(values)
    inputs, messages = prepared(OnlineInputs.load, config)
    own = inputs.rollouts
    draws = own.source.draw(8)
    assert Counter(draw.data_source for draw in draws) == {"few": 6, "many": 2}
    assert messages == [
        "few has 5 rows, but a step takes 6 of them (its weight is 3, rollout.prompts_per_step "
        "8), so they repeat within a step; give more, or a lower weight"
    ]

    rollouts = [
        plain_rollout(2, 2, group_index=draw.group_index, data_source=draw.data_source)
        for draw in draws
    ]
    scored = own.scorer(config, NO_SERVICES).score(rollouts)
    figures = rollout_metrics(scored)
    assert figures["rollout/score_mean/few"] == 0.0
    assert figures["rollout/score_mean/many"] == 5.0
    assert figures["rollout/score_mean"] == 10.0 / 8
    assert sample_row(scored[0])["data_source"] == scored[0].data_source
    alone = [each for each in scored if each.data_source == "few"]
    assert "rollout/score_mean/few" not in rollout_metrics(alone)


def test_examples_come_by_their_weights(values: dict[str, Any]):
    values["learner"] = {"batch_size": 8}
    config = SFTConfig.parse({**values, "recipe": "sft"})
    examples, messages = prepared(partial(Examples.load, load_kind=load_examples), config)
    rows = [row for _, row in examples.stream.of(range(14)).take(8)]
    assert sum(row < 5 for row in rows) == 6
    assert [message.split(" (")[0] for message in messages] == [
        "few has 5 rows, but a step takes 6 of them"
    ]
