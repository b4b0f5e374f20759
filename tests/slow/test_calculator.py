"""The calculator example learns when to call, and what it has learned needs the calculator."""

import json
import subprocess
import sys
from pathlib import Path

from raypo.storage.run_files import RunFiles
from tests.documentation import copy_examples
from tests.integration.test_documentation import environment


def test_it_learns_when_to_call_and_loses_without_the_answers(tmp_path: Path):
    copy_examples(tmp_path)

    def run(*arguments: str) -> None:
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run("examples.calculator.make_data")
    run("raypo.cli", "train", "examples/calculator/sft.yaml")
    run("raypo.cli", "train", "examples/calculator/ppo.yaml")
    silent = "rollout.environment_args.silent=true"
    run("raypo.cli", "eval", "runs/calculator", silent, "--to", "silent.json")

    rows = RunFiles.at(str(tmp_path / "runs/calculator")).metrics()
    before, after = rows[0]["eval/initial_score_mean"], rows[-1]["eval/score_mean"]
    (figures,) = json.loads((tmp_path / "silent.json").read_text())["results"].values()
    assert after > before + 0.2
    assert after > figures["eval/score_mean"] + 0.3
