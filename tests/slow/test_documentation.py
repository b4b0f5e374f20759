"""What README and docs tell a user to run and that takes minutes: trainings, sweeps, the demo."""

import pathlib
import subprocess

import pytest

from tests.documentation import Block, copy_examples
from tests.integration.test_documentation import (
    blocks_with,
    copy,
    environment,
    run_block,
)

__all__ = ["copy"]


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
