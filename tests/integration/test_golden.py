"""No number of a run moves unnoticed: real Ray Train, vLLM and DeepSpeed, the first two steps.

A run samples, and on another processor the engine rounds otherwise: once in a long while another
token comes out. So a step is compared where its tokens and those of the steps before are the
recorded ones. A few other responses leave nothing to compare; many of them are no rounding.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from raypo import train_loop_per_worker
from raypo.storage.run_files import RunFiles
from tests.golden.recorded import OVERRIDES, RUNS, config_of, differences, read, steps_of

MOST_OTHER_RESPONSES = 0.1
"""Share of a step's responses that may differ by rounding."""


def run_bare(task: Path, name: str) -> Path:
    config = config_of(task, name)
    result = TorchTrainer(
        train_loop_per_worker,
        train_loop_config=config.model_dump(),
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(name=config.name, storage_path=config.storage_path),
    ).fit()
    assert result.return_value == {"status": "finished", "step": 2}
    return Path(config.storage_path) / config.name


@pytest.mark.parametrize("name", OVERRIDES)
def test_the_first_steps_of_a_run_give_the_recorded_figures(
    name: str, first: SimpleNamespace, task: Path
):
    """The tests' own run has the keys of the recorded PPO run, and two more steps.

    The other run is the bare loop under a plain TorchTrainer, with the same figures.
    """
    golden = read(RUNS)
    folder = first.folder if name == "ppo" else run_bare(task, name)
    steps = steps_of(RunFiles.at(str(folder)))[: len(golden[name])]
    assert len(steps) == len(golden[name])
    for number, (found, expected) in enumerate(zip(steps, golden[name], strict=True), 1):
        pairs = list(zip(found["responses"], expected["responses"], strict=True))
        other = sum(mine != recorded for mine, recorded in pairs)
        if other:
            assert other <= MOST_OTHER_RESPONSES * len(pairs), f"step {number} samples otherwise"
            pytest.skip(f"step {number}: {other} of {len(pairs)} responses are rounded otherwise")
        moved = differences(found["figures"], expected["figures"], golden["tolerances"])
        assert not moved, f"step {number}; renewed by: {golden['renewed_by']}"
