"""A resume notices what has changed among the files that a config names."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from raypo import inputs
from raypo.checks.resume_checks import check_run_folder
from raypo.config import RECIPES, ConfigError
from raypo.config.sweep_config import SweepConfig
from raypo.custom.loader import source_files
from raypo.storage.run_files import RunFiles
from raypo.tuning.goal import Goal
from raypo.tuning.record import TrialRecord, write_trials
from raypo.tuning.sweep_folder import check_sweep_folder, recorded_config

ROW = {"prompt": "a", "response": "b", "chosen": "c", "rejected": "d", "answer": "b"}


def values_of(recipe: str, folder: Path) -> dict:
    """A run file of a recipe with everything outside of it that it may name."""
    for name in ("policy", "critic", "judge", "grader", "reference", "teacher"):
        (folder / name).mkdir(exist_ok=True)
        for file in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"):
            (folder / name / file).write_text(f"{name} {file}")
    for name in ("rows", "held_out", "part_1", "part_2"):
        (folder / f"{name}.jsonl").write_text(json.dumps(ROW) + "\n")
    (folder / "words.py").write_text("GOOD = ['b']\n")
    (folder / "mine.py").write_text(
        "import math\nfrom words import GOOD\n\n\ndef score(each):\n    return GOOD\n"
    )
    function: str = f"{folder}/mine.py:score"
    model: dict = {"policy": str(folder / "policy")}
    values: dict = {
        "name": "run",
        "recipe": recipe,
        "storage_path": str(folder / "runs"),
        "model": model,
        "data": {"prompts": [f"{folder}/rows.jsonl", f"{folder}/part_*.jsonl"]},
        "eval": {"prompts": f"{folder}/held_out.jsonl"},
        "callbacks": [function],
    }
    if recipe in ("ppo", "rejection_sampling", "iterative_dpo"):
        values["reward"] = {"function": function}
    if recipe == "ppo":
        model |= {"critic": str(folder / "critic"), "reference": str(folder / "reference")}
        model["reward"] = [{"path": str(folder / "judge"), "weight": 0.5}]
        judge = {"path": str(folder / "grader"), "template": "{response}"}
        values["reward"] = {"function": function, "judge": judge}
        values["ppo"] = {"policy_loss": function}
    if recipe == "distillation":
        model["teacher"] = str(folder / "teacher")
    if recipe in ("dpo", "distillation"):
        values["eval"]["function"] = function
    return values


def begun(values: dict) -> RunFiles:
    """The folder of such a run after its first step."""
    config = RECIPES[values["recipe"]].parse(values)
    files = RunFiles(config.storage_path, config.name)
    files.write_config(config.model_dump(mode="json"))
    inputs.record_inputs(config, files, resumes=False)
    files.append_metrics(1, {})
    return files


def refusal(values: dict, files: RunFiles) -> str:
    with pytest.raises(ConfigError) as caught:
        check_run_folder(RECIPES[values["recipe"]].parse(values), files)
    return str(caught.value)


def accepting(values: dict) -> dict:
    return values | {"checkpoint": {"changed_inputs": "accept"}}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_of_any_recipe_is_not_resumed_with_other_data_models_or_functions(recipe, tmp_path):
    values = values_of(recipe, tmp_path)
    files = begun(values)
    check_run_folder(RECIPES[recipe].parse(values), files)

    (tmp_path / "part_2.jsonl").write_text("{}\n")
    (tmp_path / "policy" / "model.safetensors").write_text("retrained")
    (tmp_path / "mine.py").write_text("def score(each):\n    return 1\n")

    text = refusal(values, files)
    assert f"data.prompts ({tmp_path}/part_*.jsonl): {tmp_path}/part_2.jsonl has changed" in text
    assert f"model.policy ({tmp_path}/policy): model.safetensors has changed" in text
    assert "callbacks" not in text, "they only watch, and a bug in one is no reason to start over"
    assert "checkpoint.changed_inputs (refuse)" in text
    assert "rows.jsonl has changed" not in text

    check_run_folder(RECIPES[recipe].parse(accepting(values)), files)


def touch(name: str, content: str = "another") -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (touch("part_3.jsonl"), "data.prompts ({0}/part_*.jsonl): {0}/part_3.jsonl is new"),
        (
            lambda folder: (folder / "part_1.jsonl").unlink(),
            "data.prompts ({0}/part_*.jsonl): {0}/part_1.jsonl is gone",
        ),
        (touch("held_out.jsonl"), "eval.prompts ({0}/held_out.jsonl): {0}/held_out.jsonl has"),
        (touch("words.py"), "reward.function ({0}/mine.py:score): words.py has changed"),
        (touch("words.py"), "ppo.policy_loss ({0}/mine.py:score): words.py has changed"),
        (touch("critic/config.json"), "model.critic ({0}/critic): config.json has changed"),
        (touch("judge/model.safetensors"), "model.reward.path ({0}/judge): model.safetensors has"),
        (touch("grader/config.json"), "reward.judge.path ({0}/grader): config.json has changed"),
        (touch("reference/tokenizer.json"), "model.reference ({0}/reference): tokenizer.json has"),
        (touch("policy/chat_template.jinja"), "model.policy ({0}/policy): chat_template.jinja has"),
        (touch("policy/adapter_config.json"), "model.policy ({0}/policy): adapter_config.json is"),
    ],
)
def test_the_file_and_its_key_are_named(change, told, tmp_path):
    values = values_of("ppo", tmp_path)
    files = begun(values)
    change(tmp_path)
    assert told.format(tmp_path) in refusal(values, files)


def test_a_file_that_is_only_written_again_is_the_same(tmp_path):
    values = values_of("ppo", tmp_path)
    files = begun(values)
    for path in [path for path in tmp_path.rglob("*.*") if path.parent.name != "run"]:
        if path.is_file():
            path.write_bytes(path.read_bytes())
            os.utime(path, (1, 1))
    (tmp_path / "policy" / "README.md").write_text("a model card")
    check_run_folder(RECIPES["ppo"].parse(values), files)


def test_a_run_that_made_no_step_may_begin_with_other_inputs(tmp_path):
    values = values_of("ppo", tmp_path)
    files = begun(values)
    (files.folder / "metrics.jsonl").unlink()
    touch("rows.jsonl")(tmp_path)
    check_run_folder(RECIPES["ppo"].parse(values), files)


def test_an_accepted_change_stands_in_the_summary_and_is_the_rule_from_then_on(tmp_path):
    values = values_of("ppo", tmp_path)
    files = begun(values)
    touch("rows.jsonl")(tmp_path)
    config = RECIPES["ppo"].parse(accepting(values))
    told = [f"data.prompts ({tmp_path}/rows.jsonl): {tmp_path}/rows.jsonl has changed"]
    assert inputs.record_inputs(config, files, resumes=True) == told
    assert inputs.record_inputs(config, files, resumes=True) == []

    check_run_folder(RECIPES["ppo"].parse(values), files)
    files.write_summary({"status": "finished"})
    summary = json.loads((files.folder / "summary.json").read_text())
    assert summary["accepted_inputs"] == [{"after_step": 1, "changes": told}]


def test_a_change_anywhere_in_large_weights_shows_though_little_of_them_is_read(tmp_path):
    values = values_of("sft", tmp_path)
    weights = tmp_path / "policy" / "model.safetensors"
    with weights.open("wb") as file:
        file.truncate(256 << 20)
    files = begun(values)
    with weights.open("r+b") as file:  # one layer of a few megabytes
        file.seek(100 << 20)
        file.write(b"\1" * (2 << 20))
    assert "model.safetensors has changed" in refusal(values, files)


def test_a_single_changed_byte_of_a_large_data_file_shows(tmp_path):
    values = values_of("sft", tmp_path)
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes((json.dumps(ROW).encode() + b"\n") * 1_100_000)
    assert rows.stat().st_size > inputs.LARGE_BYTES
    files = begun(values)
    with rows.open("r+b") as file:
        file.seek(rows.stat().st_size // 3)
        file.write(b"x")
    assert "rows.jsonl has changed" in refusal(values, files)


def test_a_folder_of_save_to_disk_is_its_arrow_files_without_caches(tmp_path):
    datasets = pytest.importorskip("datasets")
    values = values_of("sft", tmp_path)
    folder = tmp_path / "saved"
    datasets.Dataset.from_list([ROW, ROW]).save_to_disk(folder)
    values["data"]["prompts"] = str(folder)
    files = begun(values)
    (folder / "cache-0a1b.arrow").write_text("of a map")
    check_run_folder(RECIPES["sft"].parse(values), files)
    other = tmp_path / "other"
    datasets.Dataset.from_list([ROW, ROW | {"response": "x"}]).save_to_disk(other)
    for file in other.glob("*.arrow"):
        file.replace(folder / file.name)
    assert f"data.prompts ({folder}): data-00000-of-00001.arrow has changed" in refusal(
        values, files
    )


def test_a_hub_id_is_the_commit_that_this_machine_has(tmp_path, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    values = values_of("sft", tmp_path)
    values["model"]["policy"] = "organisation/model"
    ref = tmp_path / "hub" / "models--organisation--model" / "refs" / "main"
    ref.parent.mkdir(parents=True)
    ref.write_text("a" * 40)
    files = begun(values)
    ref.write_text("b" * 40)
    assert "model.policy (organisation/model): commit has changed" in refusal(values, files)
    ref.unlink()  # nothing is known any more: nothing to compare
    check_run_folder(RECIPES["sft"].parse(values), files)


def test_a_model_that_is_not_there_is_left_to_the_checks_of_the_inputs(tmp_path):
    values = values_of("sft", tmp_path)
    values["model"]["policy"] = str(tmp_path / "no" / "such" / "model")
    assert inputs.inputs_of(RECIPES["sft"].parse(values))["model.policy"] == {
        values["model"]["policy"]: {}
    }


def test_a_function_from_python_is_its_text_and_not_the_rest_of_its_script(tmp_path):
    script = tmp_path / "script.py"

    def function(text: str) -> Callable:
        script.write_text(text)
        namespace: dict = {}
        exec(compile(text, str(script), "exec"), namespace)
        import linecache

        linecache.clearcache()
        return namespace["score"]

    config = RECIPES["ppo"].parse(values_of("ppo", tmp_path))
    key = "reward.function"
    first = inputs.inputs_of(config, {key: function("def score(rollouts):\n    return []\n")})
    longer = "num_steps = 40\n\n\ndef score(rollouts):\n    return []\n"
    assert inputs.changes(first, inputs.inputs_of(config, {key: function(longer)})) == []
    other = inputs.inputs_of(config, {key: function("def score(rollouts):\n    return [1]\n")})
    (told,) = inputs.changes(first, other)
    assert told.endswith("mine.py:score in Python): its source has changed")


def test_a_run_that_begins_with_a_checkpoint_needs_the_model_that_it_is_of(tmp_path):
    files = begun(values_of("sft", tmp_path))
    checkpoint = files.folder / "checkpoint_1"
    checkpoint.mkdir()
    (checkpoint / "run.json").write_text('{"step": 1}')
    values = values_of("sft", tmp_path) | {"name": "next", "from_checkpoint": str(checkpoint)}
    following = RunFiles(values["storage_path"], "next")
    check_run_folder(RECIPES["sft"].parse(values), following)
    touch("rows.jsonl")(tmp_path)  # it may learn from others
    check_run_folder(RECIPES["sft"].parse(values), following)
    touch("policy/model.safetensors")(tmp_path)
    assert "its run was started with another model" in refusal(values, following)
    check_run_folder(RECIPES["sft"].parse(accepting(values)), following)


def test_a_sweep_is_not_resumed_with_other_inputs_unless_its_overrides_accept_them(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(json.dumps(values_of("ppo", tmp_path)))
    values = {
        "name": "s",
        "base": str(base),
        "space": {"ppo.kl.coef": {"choice": [0.1, 0.2]}},
        "storage_path": str(tmp_path / "sweeps"),
        "metric": "rollout/score_mean",
    }
    sweep = SweepConfig.parse(values)
    files = RunFiles(sweep.storage_path, "s")
    files.write_config(recorded_config(sweep, sweep.base_config()))
    inputs.record_inputs(sweep.base_config(), files, resumes=False)
    write_trials(files, [TrialRecord("s-0", {"ppo.kl.coef": 0.1}, "stopped")], Goal.of(sweep))
    check_sweep_folder(sweep, sweep.base_config(), files)

    touch("words.py")(tmp_path)
    with pytest.raises(ConfigError, match=r"reward\.function .*words\.py has changed"):
        check_sweep_folder(sweep, sweep.base_config(), files)
    accept = {"overrides": {"checkpoint": {"changed_inputs": "accept"}}}
    sweep = SweepConfig.parse(values | accept)
    check_sweep_folder(sweep, sweep.base_config(), files)


def test_digests_of_another_process_are_used_only_while_the_file_is_the_same(tmp_path, monkeypatch):
    config = RECIPES["sft"].parse(values_of("sft", tmp_path))
    monkeypatch.setattr(inputs, "_digest_cache", {})
    expected = inputs.inputs_of(config)
    known = inputs.cached_digests()
    monkeypatch.setattr(inputs, "_digest_cache", {})
    inputs.add_digests(known)
    monkeypatch.setattr(inputs, "_hash", lambda content, size: pytest.fail("it was read again"))
    assert inputs.inputs_of(config) == expected
    monkeypatch.undo()
    touch("rows.jsonl")(tmp_path)
    assert inputs.inputs_of(config) != expected


@pytest.mark.parametrize("name", ["__main__:<lambda>", "file.py:made.<locals>.<lambda>", ":score"])
def test_a_function_of_python_without_an_import_path_has_no_source_file(name: str):
    assert source_files(name) == []
