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


@pytest.mark.parametrize(("num_prompts", "said"), [(3, True), (4, False)])
def test_prompts_that_repeat_within_a_step_are_announced(
    tmp_path: Path, num_prompts: int, said: bool
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(num_prompts))
    )
    values: dict[str, Any] = {
        "name": "few",
        "model": {"policy": str(tiny_policy(tmp_path / "policy"))},
        "data": {"prompts": str(prompts)},
        "reward": {"function": "raypo.rewards.verifiers:exact_match"},
        "rollout": {"prompts_per_step": 4, "samples_per_prompt": 8},
    }
    tell = Said()
    run = Run(
        PPOConfig.parse(values),
        Runtime(name="few", storage_path=str(tmp_path), working_dir=str(tmp_path)),
        Workers(),
        RunFiles(str(tmp_path), "few"),
        tell,
    )
    with run.at_end:
        OnlineInputs.load(run)
    expected = (
        "a step takes 4 prompts (rollout.prompts_per_step) and data.prompts has 3, so prompts "
        "repeat within a step; give more, or set rollout.prompts_per_step to at most 3"
    )
    assert tell.messages == ([expected] if said else [])
