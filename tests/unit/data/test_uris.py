"""Prompts that lie in a storage, named by a URI."""

from pathlib import Path

import fsspec
import pyarrow.fs
import pytest
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from raypo.checks.input_checks import check_inputs
from raypo.config import RECIPES, ConfigError, PPOConfig
from raypo.data.prompts import load_prompts
from raypo.inputs import inputs_of
from tests.unit.data.prompt_files import ROWS, peek, refused, section, write

ENDINGS = [".jsonl", ".json", ".csv", ".parquet"]


@pytest.fixture(params=["sub-tree", "mock"])
def bucket(request, tmp_path, monkeypatch):
    """Puts a local file into s3://bucket/; objects are opened by key there, as in S3."""
    storage = (
        SubTreeFileSystem(str(tmp_path), LocalFileSystem())
        if request.param == "sub-tree"
        else pyarrow.fs._MockFileSystem()  # keeps its files in memory
    )
    storage.create_dir("bucket/data", recursive=True)

    def open_storage(uri, *, key):
        return storage, uri.removeprefix("s3://").partition("?")[0]

    monkeypatch.setattr("raypo.data.rows.open_storage", open_storage)

    def put(path: Path) -> str:
        with storage.open_output_stream(f"bucket/data/{path.name}") as stream:
            stream.write(path.read_bytes())
        path.unlink()
        return f"s3://bucket/data/{path.name}"

    return put


@pytest.fixture(params=["peek", "load"])
def check(request, tokenizer):
    """How many prompts there are, either way a file is looked at."""
    if request.param == "peek":
        return lambda uri: peek(uri)
    return lambda uri: len(load_prompts(section(uri), tokenizer).prompts)


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_kind_of_file_is_read_from_a_bucket(bucket, check, tmp_path, tokenizer, ending):
    uri = bucket(Path(write(tmp_path / f"prompts{ending}", ROWS)))
    assert check(uri) == 2
    loaded = load_prompts(section(uri, label_key="answer"), tokenizer)
    assert [(p.text, p.label) for p in loaded.prompts] == [("1+1=", "2"), ("10+10=", "20")]


def test_options_of_the_storage_may_stand_behind_the_name(bucket, check, tmp_path):
    uri = bucket(Path(write(tmp_path / "a.jsonl", ROWS)))
    assert check(f"{uri}?region=eu-central-1") == 2


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_uri_is_read_as_its_path(check, tmp_path, ending):
    folder = tmp_path / "a b"
    folder.mkdir()
    assert check(Path(write(folder / f"prompts{ending}", ROWS)).as_uri()) == 2


def test_a_broken_line_is_named_with_its_uri(bucket, check, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n{broken\n')
    uri = bucket(path)
    assert refused(check, uri).startswith(f"data.prompts ({uri}:2): cannot be read: Expecting")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_that_is_not_there(bucket, check, ending):
    uri = f"s3://bucket/data/none{ending}"
    assert refused(check, uri) == (
        f"data.prompts ({uri}): there is no such file in s3://bucket/data."
    )


def test_a_prefix_is_a_folder(bucket, check):
    assert "this is a folder" in refused(check, "s3://bucket/data")


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_system_of_fsspec_is_opened_by_its_name(tmp_path, tokenizer, ending):
    path = Path(write(tmp_path / f"a{ending}", ROWS))
    storage = fsspec.filesystem("memory")
    storage.pipe(f"/bucket/{ending[1:]}/a{ending}", path.read_bytes())
    uri = f"fsspec+memory://bucket/{ending[1:]}/*{ending}"
    loaded = load_prompts(section(uri, label_key="answer"), tokenizer)
    assert [(p.text, p.label) for p in loaded.prompts] == [("1+1=", "2"), ("10+10=", "20")]
    values = {"name": "run", "model": {"policy": str(tmp_path)}, "data": {"prompts": uri}}
    config = PPOConfig.parse(values | {"reward": {"function": "exact"}})
    before = inputs_of(config)["data.prompts"]
    assert list(before[uri]) == [uri.replace("*", "a")]
    storage.pipe(f"/bucket/{ending[1:]}/a{ending}", path.read_bytes() + b"\n")
    assert inputs_of(config)["data.prompts"] != before


def test_a_scheme_that_pyarrow_does_not_know(check):
    uri = "nowhere://bucket/a.jsonl"
    assert refused(check, uri).startswith(f"data.prompts ({uri}): this storage cannot be opened: ")


@pytest.mark.parametrize("recipe", ["sft", "reward_model"])
def test_examples_and_held_out_ones_are_read_by_uri(tmp_path, tokenizer, recipe):
    (tmp_path / "config.json").write_text("{}")
    rows = [{"prompt": "a", "response": "b", "chosen": "c", "rejected": "d"}]
    uri = Path(write(tmp_path / "rows.jsonl", rows)).as_uri()
    values = {
        "name": "run",
        "recipe": recipe,
        "model": {"policy": str(tmp_path)},
        "data": {"prompts": uri},
        "eval": {"prompts": uri},
    }
    check_inputs(RECIPES[recipe].parse(values))
    values["eval"]["prompts"] = uri.replace("rows", "none")
    with pytest.raises(ConfigError, match=r"eval\.prompts .*there is no such file"):
        check_inputs(RECIPES[recipe].parse(values))
