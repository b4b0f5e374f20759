"""What README and docs tell a user to run and that takes minutes: trainings, sweeps, the demo."""

import pathlib
import shutil
import subprocess

import pytest

from raypo import PPOConfig, PPOTrainer
from tests.documentation import PYTHON_SLOW, Block, copy_examples, small_copy
from tests.integration.test_documentation import (
    blocks_with,
    environment,
    run_block,
    run_python,
)


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory, local_ray: None) -> pathlib.Path:
    """A user's folder after `make demo`: examples, models, prompts and the run `quickstart`."""
    folder = small_copy(tmp_path_factory.mktemp("documentation"))
    storage = {"storage_path": str(folder / "runs")}
    config = PPOConfig.load(folder / "examples/quickstart/ppo.yaml", overrides=storage)
    PPOTrainer(config.with_absolute_paths(folder)).fit()
    # Of the second example as well, for the pages that compare runs.
    shutil.copytree(folder / "runs/quickstart", folder / "runs/verifiable-reward")
    return folder


def test_the_demo_runs_and_meets_its_conditions(tmp_path: pathlib.Path):
    copy_examples(tmp_path)
    done = subprocess.run(
        ["make", "demo"],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout


@pytest.mark.parametrize("block", blocks_with("slow"), ids=lambda block: block.where)
def test_commands_run(block: Block, copy: pathlib.Path):
    run_block(block, "slow", copy, 8000)


@pytest.mark.parametrize("page", PYTHON_SLOW)
def test_python_runs(page: str, copy: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    run_python(page, copy, monkeypatch)
