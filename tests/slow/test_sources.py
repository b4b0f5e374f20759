"""A run on several sources with weights that is stopped and goes on."""

from pathlib import Path

import pytest

from raypo import PPOConfig, PPOTrainer
from tests.integration.task import numbers, read_metrics
from tests.integration.test_sources import on_two_sources


@pytest.mark.usefixtures("local_ray")
def test_a_mix_of_sources_resumes_to_the_same_numbers(task: Path, tmp_path: Path):
    overrides = on_two_sources(task, tmp_path)
    for name, steps in (("whole", 2), ("parts", 1), ("parts", 2)):
        given = {**overrides, "name": name, "num_steps": steps}
        PPOTrainer(PPOConfig.load(task, overrides=given)).fit()

    whole, parts = (numbers(read_metrics(tmp_path / name)) for name in ("whole", "parts"))
    for one, other in zip(whole, parts, strict=True):  # the shorter one also ends by an evaluation
        assert other.items() >= {k: v for k, v in one.items() if "eval/" not in k}.items()
