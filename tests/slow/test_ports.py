"""The ported script, command and shell file of examples/ports train on the quickstart's model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raypo.storage.run_files import RunFiles
from tests.documentation import REPOSITORY, small_copy

PORTS = {
    "ported-trl": ["-m", "examples.ports.trl_grpo"],
    "ported-verl": ["-m", "raypo.cli", "train", "examples/ports/verl_grpo.yaml", "num_steps=2"],
    "ported-openrlhf": [
        *("-m", "raypo.cli", "train", "examples/ports/openrlhf_ppo.yaml"),
        "num_steps=2",
    ],
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small_copy(tmp_path_factory.mktemp("ports"))
    script = folder / "examples/ports/trl_grpo.py"
    script.write_text(script.read_text().replace('"num_steps": 10', '"num_steps": 2'))
    return folder


@pytest.mark.parametrize("name", PORTS)
def test_a_port_trains(name: str, copy: Path):
    paths = os.pathsep.join([str(copy), str(REPOSITORY)])
    done = subprocess.run(
        [sys.executable, *PORTS[name]],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": paths, "CI": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    last = RunFiles(str(copy / "runs"), name).metrics()[-1]
    assert last["step"] == 2
    if name == "ported-trl":
        assert "only this script can start the run:" in done.stdout
        assert {"reward/exact", "reward/brevity", "mine/longest"} <= last.keys()
