"""What a run says of its prompts before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from raypo.cluster.run_monitor import MonitorClient
from raypo.collectives import Workers
from raypo.config import PPOConfig
from raypo.run.online_inputs import OnlineInputs
from raypo.run.run import Run
from raypo.run.setup import Runtime
from raypo.storage.run_files import RunFiles
from tests.tiny import tiny_policy


class Said(MonitorClient):
    """Keeps what would go to the driver's console."""

    def __init__(self) -> None:
        super().__init__(None)
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


def loaded(
    tmp_path: Path, num_prompts: int, **changes: dict[str, Any]
) -> tuple[OnlineInputs, list[str]]:
    """Load so many prompts, four in a step; return the inputs and the messages."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(num_prompts))
    )
    values: dict[str, Any] = {
        "name": "few",
        "model": {"policy": str(tiny_policy(tmp_path / "policy"))},
        "data": {"prompts": str(prompts)},
        "reward": {"function": "raypo.rewards.verifiers:answer_format"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 8},
        "num_steps": 5,
    }
    for section, keys in changes.items():
        values[section] |= keys
    tell = Said()
    run = Run(
        PPOConfig.parse(values),
        Runtime(name="few", storage_path=str(tmp_path), working_dir=str(tmp_path)),
        Workers(),
        RunFiles(str(tmp_path), "few"),
        tell,
    )
    with run.at_end:
        return OnlineInputs.load(run), tell.messages


@pytest.mark.parametrize(("num_prompts", "said"), [(3, True), (4, False)])
def test_prompts_that_repeat_within_a_step_are_announced(
    tmp_path: Path, num_prompts: int, said: bool
):
    _, messages = loaded(tmp_path, num_prompts)
    expected = (
        "a step takes 4 prompts (rollout.prompts_per_step), but data.prompts has only 3, so "
        "prompts repeat within a step; give more, or set rollout.prompts_per_step to at most 3"
    )
    assert messages == ([expected] if said else [])


@pytest.mark.parametrize(("num_prompts", "said"), [(20, True), (19, False)])
def test_a_curriculum_without_repeated_prompts_is_announced(
    tmp_path: Path, num_prompts: int, said: bool
):
    inputs, messages = loaded(tmp_path, num_prompts, data={"curriculum": {"target": 0.3}})
    assert inputs.rollouts is not None
    assert inputs.rollouts.source.curriculum is not None
    expected = (
        "data.curriculum: has little data to learn from: the run draws 20 prompts (num_steps x "
        f"rollout.prompts_per_step) and data.prompts has {num_prompts}, so most prompts have no "
        "pass rate yet when they are chosen; give fewer prompts or more steps, or remove it"
    )
    assert messages == ([expected] if said else [])
