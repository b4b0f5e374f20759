"""An example is a folder that can be copied: its run files hold elsewhere, under another name."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification
from typer.testing import CliRunner

from raypo.cli import app
from tests.tiny import tiny_policy

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.iterdir() if list(path.glob("*.yaml")))
NAMES.remove("cluster")  # files of other programs
NAMES.remove("recipes")  # models and data of the hub: test_recipes_of_known_models.py
OF_THE_QUICKSTART = ("own_functions", "ports", "verifiable_reward")
"""Go on from its demo, and need it beside them."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    """A copy of the example, as after its data and the runs before: the current folder."""
    if name == "verifiers_game":
        pytest.importorskip("verifiers", reason="the package verifiers is optional")
    mine = copied(name, tmp_path / "mine")
    source = copied("quickstart", tmp_path / "quickstart") if name in OF_THE_QUICKSTART else mine
    monkeypatch.chdir(source)
    if (source / "make_data.py").exists():
        runpy.run_path("make_data.py", run_name="__main__")
    elif (source / "prepare.py").exists():  # its model comes from a package
        runpy.run_path("prepare.py")["save_prompts"]()
        tiny_policy(source / "model")
    for pairs in ("pairs", "eval_pairs"):
        row = {"prompt": "5031=", "chosen": "0135", "rejected": "0153"}
        if (source / "make_pairs.py").exists():
            (source / f"data/{pairs}.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(mine)
    for run in ("quickstart", "arithmetic", "calculator", "code"):
        if (source / "data/base").exists():
            shutil.copytree(source / "data/base", f"runs/{run}-sft/policy")
            shutil.copytree(source / "data/base", f"runs/{run}-rejection-sampling/policy")
            model = AutoModelForSequenceClassification.from_pretrained(
                source / "data/base", num_labels=1
            )
            model.save_pretrained(f"runs/{run}-reward-model/reward_model")
    return mine


def copied(name: str, to: Path) -> Path:
    ignored = shutil.ignore_patterns("data", "model", "__pycache__")
    return shutil.copytree(EXAMPLES / name, to, ignore=ignored)


@pytest.mark.parametrize("name", NAMES)
def test_its_run_files_have_a_plan_where_it_was_copied_to(folder: Path, name: str):
    model = [f"model.policy={tiny_policy(folder / 'tiny')}"] if name == "smollm2_judge" else []
    for file in sorted(path.name for path in folder.glob("*.yaml")):
        done = CliRunner().invoke(app, ["plan", file, "--cluster", "8xCPU", *model])
        assert done.exit_code == 0, f"{file}: {done.output}"
        assert "examples/" not in (folder / file).read_text()
