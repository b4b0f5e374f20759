"""Runs go on from their last whole checkpoint, also at a URI, and with as many workers as there
are."""

import json
from pathlib import Path
from typing import Any

import pytest

from raypo import SFTConfig, SFTTrainer
from raypo.storage.checkpoints import checkpoint_state
from tests.integration.pipeline import sft_values, write_examples
from tests.integration.task import numbers, read_metrics
from tests.unit.run.killed_saves import POINTS

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("examples")
    write_examples(folder)
    rates = {"lr_schedule": "constant"}  # or the number of steps could not change
    return sft_values(folder, **rates) | {"eval": {}, "checkpoint": {"every": 1, "keep": 3}}


@pytest.fixture(scope="module")
def plain(values: dict[str, Any], local_ray: None) -> list[dict[str, Any]]:
    return train(values, "plain")


def train(values: dict[str, Any], name: str, **changes: Any) -> list[dict[str, Any]]:
    config = SFTConfig.parse(values | {"name": name, **changes})
    result = SFTTrainer(config).fit()
    assert result.return_value == {"status": "finished", "step": config.num_steps}
    return read_metrics(folder_of(values, name))


def folder_of(values: dict[str, Any], name: str) -> Path:
    return Path(values["storage_path"].removeprefix("file://")) / name


def test_a_run_at_a_uri_skips_what_is_damaged_and_ends_with_the_same_numbers(
    values: dict[str, Any],
    plain: list[dict[str, Any]],
    capfd: pytest.CaptureFixture[str],
):
    """Its checkpoints are uploaded beside the steps; it ends after the last one."""
    far = values | {"storage_path": f"file://{values['storage_path']}"}
    assert len(train(far, "damaged", num_steps=4)) == 4
    folder = folder_of(values, "damaged")
    whole = {checkpoint_state(str(path))["step"]: path for path in folder.glob("checkpoint_2*")}
    assert sorted(whole) == [2, 3, 4]
    (weights,) = whole[4].glob("model_0.pt")
    weights.write_bytes(weights.read_bytes()[:-1000])
    (whole[3] / "manifest_0_of_1.json").unlink()
    capfd.readouterr()

    rows = train(far, "damaged")
    out = capfd.readouterr().out.replace("\n", "")
    assert "is damaged and skipped: model_0.pt has" in out
    assert "is damaged and skipped: manifest_*.json is missing" in out
    assert "Resuming after step 2" in out
    assert numbers(rows) == numbers(plain)
    policy = "policy/model.safetensors"
    assert (folder / policy).read_bytes() == (folder_of(values, "plain") / policy).read_bytes()
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"


def test_a_run_goes_on_with_other_workers_at_another_stage(
    values: dict[str, Any], plain: list[dict[str, Any]]
):
    learner = values["learner"]
    train(values, "wider", num_steps=2)
    train(values, "wider", num_steps=4, learner=learner | {"num_workers": 2, "zero_stage": 3})
    rows = train(values, "wider", learner=learner | {"zero_stage": 0})
    losses, expected = ([row["train/loss"] for row in each] for each in (rows, plain))
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses[:2] == expected[:2]


def test_a_run_that_is_killed_anywhere_in_a_save_goes_on_from_the_last_whole_checkpoint(
    values: dict[str, Any], plain: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
):
    """Each worker is killed at another point of the same save, which ends at last."""
    checkpoint = {"every": 1, "best_by": "train/loss", "best_mode": "min", "background": True}
    changes = {
        "callbacks": ["tests.unit.run.killed_saves:watch"],
        "max_failures": len(POINTS),
        "checkpoint": checkpoint,
    }
    capfd.readouterr()
    rows = train(values, "killed", **changes)
    folder = folder_of(values, "killed")
    assert (folder / "killed.txt").read_text().splitlines() == POINTS
    out = capfd.readouterr().out.replace("\n", "")
    # The checkpoint before is whole, but Ray Train may not have listed it yet.
    resumed = [out.count(f"Resuming after step {step}") for step in (1, 2)]
    assert sum(resumed) == len(POINTS)
    assert "is damaged" not in out
    assert numbers(rows) == numbers(plain)
    policy = "policy/model.safetensors"
    assert (folder / policy).read_bytes() == (folder_of(values, "plain") / policy).read_bytes()
    best = min(plain, key=lambda row: row["train/loss"])["step"]
    assert json.loads((folder / "best" / "best.json").read_text())["step"] == best
    assert (folder / "best" / policy).is_file()
    assert not list(folder.glob(".partial-checkpoint-*"))
