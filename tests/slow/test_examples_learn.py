"""Examples learn what they are said to learn, each in a copy of its folder and nothing else."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raypo.storage.run_files import RunFiles
from tests.documentation import REPOSITORY
from tests.integration.test_documentation import environment


def run(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def learn(folder: Path, example: str, name: str, *files: str) -> list[dict[str, Any]]:
    """The metrics of a run, the last of those that the files describe."""
    ignored = shutil.ignore_patterns("data", "__pycache__")
    shutil.copytree(REPOSITORY / "examples" / example, folder, ignore=ignored, dirs_exist_ok=True)
    run(folder, "make_data.py")
    for file in files:
        run(folder, "-m", "raypo.cli", "train", file)
    return RunFiles.at(str(folder / "runs" / name)).metrics()


def test_the_guessing_game_is_won_by_who_remembers_what_was_answered(tmp_path: Path):
    rows = learn(tmp_path, "guessing_game", "guessing-game", "ppo.yaml")
    before, after = rows[0]["eval/initial_score_mean"], rows[-1]["eval/score_mean"]
    assert after > before + 0.2
    assert after > 3 / 8 + 0.2  # whoever does not read the answers wins at most 3 of 8


def test_a_game_of_verifiers_is_learned(tmp_path: Path):
    pytest.importorskip("verifiers", reason="the package verifiers is optional: raypo[verifiers]")
    rows = learn(tmp_path, "verifiers_game", "verifiers-game", "ppo.yaml")
    assert rows[-1]["eval/reward/found"] > rows[0]["eval/initial_reward/found"] + 0.2
    assert rows[-1]["reward/numbers"] > 0.95
    assert sum(row["rollout/episodes_failed"] for row in rows) == 0


def test_the_calculator_is_called_when_it_pays_and_is_needed(tmp_path: Path):
    rows = learn(tmp_path, "calculator", "calculator", "sft.yaml", "ppo.yaml")
    silent = "rollout.environment_args.silent=true"
    run(tmp_path, "-m", "raypo.cli", "eval", "runs/calculator", silent, "--to", "silent.json")
    before, after = rows[0]["eval/initial_score_mean"], rows[-1]["eval/score_mean"]
    (figures,) = json.loads((tmp_path / "silent.json").read_text())["results"].values()
    assert after > before + 0.2
    assert after > figures["eval/score_mean"] + 0.3
    assert rows[-1]["tools/calls_mean"] > 0.4  # of the tasks, half are products


def test_code_that_is_judged_by_running_it_gets_right(tmp_path: Path):
    rows = learn(tmp_path, "code", "code", "sft.yaml", "ppo.yaml")
    assert rows[0]["eval/initial_reward/solved"] < 0.8
    assert rows[-1]["eval/reward/solved"] > 0.9
