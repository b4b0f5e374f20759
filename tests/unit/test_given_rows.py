"""Rows that Python hands to a trainer become files of the run, which its config names."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml
from typer import Exit

from raypo.checks.resume_checks import check_run_folder
from raypo.cli.train import train
from raypo.cluster.placement import PlacementError
from raypo.config import ConfigError, PPOConfig
from raypo.inputs import record_inputs
from raypo.storage.run_files import RunFiles
from raypo.trainer import DPOTrainer, PPOTrainer
from raypo.trainer.given_rows import with_rows
from raypo.trainer.trainer import RecipeTrainer

ROWS = [
    {"prompt": [{"role": "user", "content": "1+1="}], "answer": 2},
    {"prompt": "2+2=", "answer": "four"},
]
"""Of mixed kinds, as no table could hold them."""


def judge(rollouts: list[Any]) -> list[float]:
    return [0.0] * len(rollouts)


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    return {
        "name": "run",
        "storage_path": str(tmp_path / "runs"),
        "model": {"policy": str(tmp_path / "policy")},
        "data": {"label_key": "answer"},
    }


def trainer(values: dict[str, Any], tmp_path: Path, **arguments: Any) -> PPOTrainer:
    path = tmp_path / "ppo.yaml"
    path.write_text(yaml.safe_dump(values))
    return PPOTrainer(path, reward_funcs=judge, **arguments)


def refusal(values: dict[str, Any], tmp_path: Path, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as error:
        trainer(values, tmp_path, **arguments)
    return str(error.value)


def test_rows_stand_in_the_run_folder_and_the_config_names_them(
    values: dict[str, Any], tmp_path: Path
):
    made = trainer(values, tmp_path, datasets={"data.prompts": ROWS, "eval.prompts": ROWS[1:]})
    for sources, rows in ((made.config.data.prompts, ROWS), (made.config.eval.prompts, ROWS[1:])):
        (path,) = map(str, sources or ())
        assert Path(path).parent == tmp_path / "runs" / "run" / "given_rows"
        assert [json.loads(line) for line in Path(path).read_text().splitlines()] == rows
    assert made.train_loop_config["data"]["prompts"] == made.config.data.prompts  # type: ignore[index]


def test_the_same_rows_have_the_same_name_and_others_another(
    values: dict[str, Any], tmp_path: Path
):
    first, again, other = (
        trainer(values, tmp_path, datasets={"data.prompts": rows}).config.data.prompts
        for rows in (ROWS, [dict(row) for row in ROWS], ROWS[:1])
    )
    assert first == again != other, "a run that goes on with other rows is refused"


def test_rows_come_back_after_the_folder_is_removed(values: dict[str, Any], tmp_path: Path):
    made = trainer(values, tmp_path, datasets={"data.prompts": ROWS})
    RunFiles(values["storage_path"], "run").remove()  # as fresh=True does, before any config
    with_rows(made.config, {"data.prompts": ROWS})
    assert Path(str(made.config.data.prompts[0])).is_file()


def test_rows_of_a_run_at_a_uri_lie_there_too(values: dict[str, Any], tmp_path: Path):
    storage = tmp_path / "bucket"
    values["data"]["prompts"] = "given"
    config = PPOConfig.parse({**values, "storage_path": f"file://{storage}"})
    (uri,) = with_rows(config, {"data.prompts": ROWS}).data.prompts
    assert str(uri).startswith(f"file://{storage}/run/given_rows/data.prompts-")
    assert len(Path(str(uri).removeprefix("file://")).read_text().splitlines()) == 2


def test_what_numpy_holds_is_written_as_numbers_and_lists(values: dict[str, Any], tmp_path: Path):
    rows = [{"prompt": "p", "answer": np.int64(3), "ids": np.arange(2)}]
    made = trainer(values, tmp_path, datasets={"data.prompts": rows})
    text = Path(str(made.config.data.prompts[0])).read_text()
    assert json.loads(text) == {"prompt": "p", "answer": 3, "ids": [0, 1]}


def test_a_data_set_of_the_real_package_is_taken(values: dict[str, Any], tmp_path: Path):
    datasets = pytest.importorskip("datasets", reason="the package datasets is optional")
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(3)]
    made = trainer(values, tmp_path, datasets={"data.prompts": datasets.Dataset.from_list(rows)})
    lines = Path(str(made.config.data.prompts[0])).read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows


@pytest.mark.parametrize(
    "arguments",
    [
        {"datasets": {"train": ROWS, "eval": ROWS[1:]}},
        {"datasets": {"train": ROWS, "eval.prompts": ROWS[1:]}},
        {"train_dataset": ROWS, "eval_dataset": ROWS[1:]},
    ],
)
def test_every_argument_for_rows_writes_the_same_files(
    values: dict[str, Any], tmp_path: Path, arguments: dict[str, Any]
):
    rows = {"data.prompts": ROWS, "eval.prompts": ROWS[1:]}
    whole, made = (
        trainer(values, tmp_path, **given).config for given in ({"datasets": rows}, arguments)
    )
    assert (made.data.prompts, made.eval.prompts) == (whole.data.prompts, whole.eval.prompts)


def test_held_out_data_of_dpo_are_pairs(values: dict[str, Any], tmp_path: Path):
    pairs = [{"prompt": "1", "chosen": "2", "rejected": "3"}]
    del values["data"]
    made = DPOTrainer(values, datasets={"train": pairs, "eval": pairs})
    assert made.config.eval.pairs
    assert made.config.eval.prompts is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"datasets": {"valid": ROWS}}, "datasets (valid): the keys must be train, eval or keys of "
            "the config: data.prompts, eval.prompts."),
        ({"datasets": {"train": ROWS, "data.prompts": ROWS}},
            "datasets (data.prompts): the rows of this key are given twice."),
        ({"datasets": {"data.prompts": iter(ROWS)}},
            "data.prompts (builtins.list_iterator): rows must be a ray.data.Dataset, a "
            "datasets.Dataset or a list of dicts. Write a streaming data set to files first "
            "(save_to_disk, write_parquet), and name them in data.prompts."),
        ({"datasets": {"data.prompts": [ROWS[1], {"prompt": b"x"}]}},
            "data.prompts (given in Python): row 2 cannot be written as JSON: a bytes is in "
            "it. Rows must be mappings that contain texts, numbers, lists and mappings; leave "
            "other columns out."),
        ({"datasets": {"train": []}}, "data.prompts (given in Python): there are no rows. Give at "
         "least one."),
    ],
)  # fmt: skip
def test_what_cannot_be_rows_is_refused(
    values: dict[str, Any], tmp_path: Path, arguments: Any, told: str
):
    assert refusal(values, tmp_path, **arguments) == told


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("rows.jsonl", "Name files and data sets in the config: data.prompts."),
        ({"train": ROWS, "test": ROWS}, "Pass one of its values, like ['train']."),
        (pa.Table.from_pylist(ROWS[:1]), "Pass its rows as dicts: to_pylist()."),
        (pd.DataFrame(ROWS), 'Pass its rows as dicts: to_dict("records").'),
    ],
)
def test_rows_of_other_types_are_refused_with_the_way_to_pass_them(
    values: dict[str, Any], tmp_path: Path, rows: Any, told: str
):
    assert refusal(values, tmp_path, datasets={"data.prompts": rows}).endswith(
        f"rows must be a ray.data.Dataset, a datasets.Dataset or a list of dicts. {told}"
    )


def test_wrong_rows_are_told_like_those_of_a_file(values: dict[str, Any], tmp_path: Path):
    told = refusal(values, tmp_path, datasets={"data.prompts": [{"promt": "p", "answer": 1}]})
    assert told.startswith("data.prompt_key (prompt): ")


@pytest.mark.parametrize("changed_inputs", ["refuse", "accept"])
def test_a_run_goes_on_with_other_rows_only_if_changed_inputs_are_accepted(
    values: dict[str, Any], tmp_path: Path, changed_inputs: str
):
    begun = trainer(values, tmp_path, datasets={"data.prompts": ROWS}).config
    files = RunFiles(values["storage_path"], "run")
    files.write_config(begun.model_dump(mode="json"))
    record_inputs(begun, files, resumes=False)
    files.append_metrics(1, {})
    check_run_folder(trainer(values, tmp_path, datasets={"data.prompts": ROWS}).config, files)
    values["checkpoint"] = {"changed_inputs": changed_inputs}
    other = trainer(values, tmp_path, datasets={"data.prompts": ROWS[:1]}).config
    if changed_inputs == "accept":
        check_run_folder(other, files)
        said = record_inputs(other, files, resumes=True)
    else:
        with pytest.raises(ConfigError, match=r"^checkpoint\.changed_inputs \(refuse\)") as error:
            check_run_folder(other, files)
        said = [line.strip() for line in str(error.value).splitlines()]
    assert "data.prompts (given in Python): the data set has changed" in said
    values["data"]["prompts"] = str(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "answer": 1}\n')
    with pytest.raises(ConfigError, match=r"a run with another config:\n  data\.prompts: "):
        check_run_folder(trainer(values, tmp_path).config, files)


def test_the_command_starts_a_run_of_given_rows_over_without_losing_them(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The run's folder has the only copies; the cluster is too small at first."""
    config = trainer(values, tmp_path, train_dataset=ROWS).config
    files = RunFiles(values["storage_path"], "run")
    recorded = config.model_dump(mode="json") | {"reward": {"function": f"{__file__}:judge"}}
    files.write_config(recorded)
    files.append_metrics(1, {})

    def refuse(self: Any) -> None:
        raise PlacementError("no room")

    monkeypatch.setattr(RecipeTrainer, "fit", refuse)
    for _ in range(2):
        with pytest.raises(Exit):
            train(files.folder, None, fresh=True)
    assert files.config() == recorded
    assert Path(str(config.data.prompts[0])).is_file()
