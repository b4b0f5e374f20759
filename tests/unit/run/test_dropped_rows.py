"""A run says which rows it has dropped, of what it learns from and of what is held out."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raypo.checks.input_checks import check_inputs
from raypo.checks.row_checks import with_steps_of_epochs
from raypo.collectives import Workers
from raypo.config import DPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from raypo.data.examples import load_examples, load_pairs
from raypo.data.rows import RowError
from raypo.recipes.dpo import load_preferences
from raypo.recipes.on_examples import Examples
from raypo.run.online_inputs import OnlineInputs
from raypo.run.run import Run
from raypo.run.setup import Runtime
from raypo.storage.run_files import RunFiles
from tests.tiny import tiny_policy
from tests.unit.run.test_few_prompts import Said

GOOD = {"prompt": "1+1=", "response": "2", "chosen": "2", "rejected": "3"}
BAD = {"prompt": [{"role": "user", "content": None}]}


@pytest.mark.parametrize(
    ("kind", "config", "more"),
    [
        (
            OnlineInputs.load,
            PPOConfig,
            {"reward": {"function": "raypo.rewards.verifiers:answer_format"}},
        ),
        (
            partial(Examples.load, load_kind=load_examples),
            SFTConfig,
            {"learner": {"batch_size": 2}},
        ),
        (
            partial(Examples.load, load_kind=load_pairs),
            RewardModelConfig,
            {"learner": {"batch_size": 2}},
        ),
        (load_preferences, DPOConfig, {"learner": {"batch_size": 2}}),
    ],
)
def test_a_run_says_what_it_has_dropped(tmp_path: Path, kind: Any, config: Any, more: Any):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [GOOD, BAD, GOOD]) + "{\n")
    held_out = {"pairs" if config is DPOConfig else "prompts": str(path)}
    values = {
        "name": "few",
        "model": {"policy": str(tiny_policy(tmp_path / "policy"))},
        "data": {"prompts": str(path), "on_error": "drop"},
        "eval": held_out,
    } | more
    if config is PPOConfig:
        values["rollout"] = {"prompts_per_step": 2, "samples_per_prompt": 16}
    tell = Said()
    runtime = Runtime(name="few", storage_path=str(tmp_path), working_dir=str(tmp_path))
    files = RunFiles(str(tmp_path), "few")
    run = Run(config.parse(values), runtime, Workers(), files, tell)
    with run.at_end:
        kind(run)
    dropped = [line for line in tell.messages if not line.startswith("ignored in ")]
    for key, told in zip(("data.prompts", f"eval.{next(iter(held_out))}"), dropped, strict=True):
        assert told.startswith(
            f"2 bad rows of {key} are dropped (data.on_error). The first found: "
        )
        assert f"{path}:2" in told or f"{path}:4" in told


@pytest.mark.parametrize("key", ["data.prompts", "eval.prompts"])
def test_labels_that_the_verifier_cannot_read_are_refused_or_dropped_as_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
):
    monkeypatch.setattr(
        "raypo.checks.row_checks.LABEL_ROWS", 0
    )  # before the start it sees none of a data set
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    rows = [{"prompt": "1+1=", "answer": answer} for answer in ("2", "x", "4")]
    bad.write_text("".join(json.dumps(row) + "\n" for row in rows))
    good.write_text(json.dumps(rows[0]) + "\n")
    train, held_out = (bad, good) if key == "data.prompts" else (good, bad)
    own = "raypo.rewards.verifiers:number_answer"  # of the bad source; the common one reads any
    values: dict[str, Any] = {
        "name": "few",
        "model": {"policy": str(tiny_policy(tmp_path / "policy"))},
        "data": {"prompts": str(train), "label_key": "answer"},
        "eval": {"prompts": str(held_out)},
        "reward": {"function": "raypo.rewards.verifiers:answer_format"},
    }
    values[key.partition(".")[0]]["prompts"] = {"path": str(bad), "function": own}
    runtime = Runtime(name="few", storage_path=str(tmp_path), working_dir=str(tmp_path))

    def prepared(on_error: str) -> tuple[OnlineInputs, list[str]]:
        tell = Said()
        values["data"]["on_error"] = on_error
        config = PPOConfig.parse(values)
        check_inputs(config, on_this_machine=False)
        files = RunFiles(str(tmp_path), "few")
        run = Run(config, runtime, Workers(), files, tell)
        with run.at_end:
            return OnlineInputs.load(run), tell.messages

    with pytest.raises(RowError, match=f"{bad}:2 is not a number: 'x'"):
        prepared("refuse")
    inputs, told = prepared("drop")
    assert inputs.rollouts is not None
    source, held_out_prompts = inputs.rollouts.source, inputs.rollouts.held_out
    kept = source.stream.items if key == "data.prompts" else held_out_prompts
    assert [each.label for each in kept] == ["2", "4"]
    (note,) = [line for line in told if line.startswith(f"1 bad rows of {key} are dropped")]
    assert f"{bad}:2" in note


def test_dropped_lines_are_no_rows_of_an_epoch(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(GOOD) + "\n" for _ in range(4)) + "{\n")
    values = {
        "recipe": "sft", "name": "few", "num_epochs": 2, "model": {"policy": "policy"},
        "data": {"prompts": str(path), "on_error": "drop"}, "learner": {"batch_size": 2},
    }  # fmt: skip
    assert with_steps_of_epochs(SFTConfig.parse(values)).num_steps == 4
