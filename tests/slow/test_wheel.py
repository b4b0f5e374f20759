"""The wheel, built and installed in an empty environment beside the packages that commands need."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LIGHT = "filelock numpy omegaconf pandas pyarrow pydantic rich safetensors typer xxhash"
"""Imports of `raypo config` and `raypo plan`; torch and vLLM would be gigabytes."""


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(each) for each in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, REPOSITORY, cwd=folder)
    (made,) = folder.glob("raypo-*.whl")
    return made


def test_the_wheel_has_the_package_and_nothing_else(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"raypo", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}
    assert {"raypo/py.typed", "raypo/report/templates/page.html"} <= set(names)
    modules = {path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("raypo/**/*.py")}
    assert modules <= set(names)


def test_the_command_runs_in_an_empty_environment(wheel: Path, tmp_path: Path):
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    constraints = REPOSITORY / "constraints.txt"
    run(python, "-m", "pip", "install", "-q", "--no-deps", wheel, cwd=tmp_path)
    packages = LIGHT.split()
    run(python, "-m", "pip", "install", "-q", "-c", constraints, *packages, cwd=tmp_path)
    raypo = tmp_path / "venv/bin/raypo"
    assert "train" in run(raypo, "--help", cwd=tmp_path)
    assert "Responses per optimizer step" in run(
        raypo, "config", "ppo.minibatch_size", cwd=tmp_path
    )
    (tmp_path / "run.yaml").write_text("name: x\nmodle: {}\n")
    wrong = subprocess.run(
        [raypo, "plan", "run.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert wrong.returncode == 2
    assert "modle: there is no such key. Did you mean model?" in wrong.stderr


def test_every_dependency_can_be_had_in_an_empty_environment(wheel: Path, tmp_path: Path):
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv/bin/python"
    resolved = run(
        *(python, "-m", "pip", "install", "--dry-run", "-c", REPOSITORY / "constraints.txt"),
        f"{wheel}[all]",
        cwd=tmp_path,
    )
    assert all(f" {name}-" in resolved for name in ("optuna", "plotly", "starlette", "torch"))
