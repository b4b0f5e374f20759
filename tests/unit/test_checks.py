"""Wrong input, and the sentence that a user gets for it."""

import json
import os
import re
import shutil
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path

import pytest

from raypo.checks.input_checks import check_disk, check_evaluation, check_inputs
from raypo.checks.model_checks import check_model
from raypo.checks.resume_checks import check_run_folder, is_finished
from raypo.checks.row_checks import check_prompt_lengths, with_steps_of_epochs
from raypo.cluster.hardware import cpu_count
from raypo.config import ConfigError, PPOConfig, SFTConfig
from raypo.inputs import record_inputs
from raypo.ray_internals import CHECKPOINTS
from raypo.storage.checkpoints import find_checkpoint
from raypo.storage.run_files import RunFiles
from tests.tiny import tiny_policy

Usage = namedtuple("Usage", ["total", "used", "free"])


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    """A run file whose input is all there."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    (tmp_path / "reward.py").write_text("def exact(rollouts):\n    return []\n")
    return {
        "name": "run",
        "storage_path": str(tmp_path / "runs"),
        "model": {"policy": str(tmp_path / "policy")},
        "data": {"prompts": str(tmp_path / "prompts.jsonl"), "label_key": "answer"},
        "reward": {"function": f"{tmp_path}/reward.py:exact"},
    }


def refusal(values: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        check_inputs(PPOConfig.parse(values))
    return str(caught.value)


def test_good_input_passes(values: dict):
    check_inputs(PPOConfig.parse(values))


def test_a_disk_without_room_for_the_policy_is_named(values: dict, tmp_path: Path):
    write_weights(
        tmp_path / "policy" / "model.safetensors", "U8", shutil.disk_usage(tmp_path).free + 10**12
    )
    config = PPOConfig.parse(values)
    with pytest.raises(ConfigError, match=rf"^storage_path \({tmp_path}/runs\): "):
        check_disk(config)
    check_disk(PPOConfig.parse(values | {"storage_path": "s3://bucket/runs"}))
    check_inputs(config)  # a finished run needs no room, and this is called before that is known


def write_weights(path: Path, dtype: str, size: int) -> None:
    """Write a sparse file of weights, which takes no room itself."""
    count = size // {"U8": 1, "F32": 4, "BF16": 2}[dtype]
    tensor = {"dtype": dtype, "shape": [count], "data_offsets": [0, size]}
    header = json.dumps({"weight": tensor}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)


def test_a_disk_is_not_refused_for_files_that_are_not_written_again(
    values: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    policy, room = tmp_path / "policy", 10**10
    usage = Usage(2 * room, room, room)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    write_weights(policy / "model.safetensors", "F32", room + 4)
    (policy / "model-gone.safetensors").symlink_to(policy / "gone")
    write_weights(policy / "model.fp16.safetensors", "BF16", room)
    check_disk(PPOConfig.parse(values))  # bfloat16 takes half
    in_float32 = {"policy": str(policy), "dtype": "float32"}
    with pytest.raises(ConfigError, match="trained policy alone takes 10 GB"):
        check_disk(PPOConfig.parse(values | {"model": in_float32}))
    usage = Usage(0, 0, 0)  # of some network file systems
    check_disk(PPOConfig.parse(values | {"model": in_float32}))


def test_a_storage_path_that_may_not_be_read_is_refused(
    values: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Root may read everything, so the error is planted."""

    def closed(path: Path) -> bool:
        if path.is_relative_to(tmp_path / "runs"):
            raise PermissionError(13, "Permission denied", str(path))
        return os.path.isdir(path)

    monkeypatch.setattr(Path, "is_dir", closed)
    text = f"{tmp_path}/runs: this user may not read it (Permission denied)"
    with pytest.raises(ConfigError, match=re.escape(text)):
        check_disk(PPOConfig.parse(values))
    with pytest.raises(ConfigError, match="may not read it"):
        RunFiles(values["storage_path"], "run").check_unused()


def test_a_judges_template_names_what_the_rows_have(values: dict):
    judge = {"url": "http://a/v1", "model": "m", "template": "{prompt} {label} {response} {rubric}"}
    values["reward"] = {"judge": judge}
    text = "reward.judge.template: names {rubric}, but "
    assert text in (said := refusal(values))
    assert "prompts.jsonl:1 has no such column. It has prompt, answer." in said
    judge["template"] = '{"grade": 1}? {label} {response} {answer}'
    check_inputs(PPOConfig.parse(values))
    del values["data"]["label_key"]
    assert "data.label_key (None): reward.judge.template names {label}" in refusal(values)


def with_labels(values: dict, *labels: object, function: str = "number_answer") -> dict:
    rows = [json.dumps({"prompt": "1+1=", "answer": label}) for label in labels]
    Path(values["data"]["prompts"]).write_text("\n".join(rows))
    return values | {"reward": {"function": f"raypo.rewards.verifiers:{function}"}}


@pytest.mark.parametrize("label", ["", "x^2", None, {"a": 2}, float("nan"), "prose"])
def test_a_label_that_the_verifier_cannot_read_is_refused_with_its_line(values: dict, label):
    text = refusal(with_labels(values, *["2"] * 1500, label))
    assert "prompts.jsonl:1501" in text
    assert text.startswith("data.label_key: ")


def test_labels_are_left_to_loading_where_bad_rows_are_dropped(values: dict):
    values = with_labels(values, "2", "x^2")
    values["data"]["on_error"] = "drop"
    check_inputs(PPOConfig.parse(values))


def test_prose_is_no_label_of_the_verifier_of_formulas(values: dict):
    values = with_labels(
        values, "New York", "x^2", "We leave the proof to the reader. It is long but easy."
    )
    values["reward"]["function"] = "raypo.rewards.math_verifiers:math_answer"
    assert "prompts.jsonl:3 is prose" in refusal(values)


def test_a_verifier_without_a_label_key_is_told_what_to_set(values: dict):
    values = with_labels(values, "2")
    del values["data"]["label_key"]
    assert refusal(values).startswith(
        "data.label_key (None): raypo.rewards.verifiers:number_answer"
    )


def test_labels_are_read_by_the_function_of_their_source(values: dict, tmp_path: Path):
    values = with_labels(values, "x^2")
    verifier = values["reward"]["function"]
    check_inputs(PPOConfig.parse(values), reward_fn=lambda rollouts: [])  # it judges
    own = {"path": values["data"]["prompts"], "function": f"{tmp_path}/reward.py:exact"}
    values["data"]["prompts"] = [own]
    check_inputs(PPOConfig.parse(values))
    values["eval"] = {"prompts": own["path"], "function": verifier}
    assert "prompts.jsonl:1 is not a number: 'x^2'" in refusal(values)
    config = PPOConfig.parse(values)
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:1 is not a number"):
        check_evaluation(values["model"]["policy"], config)


def test_held_out_prompts_are_checked_under_their_own_key(values: dict, tmp_path: Path):
    values["eval"] = {"prompts": str(tmp_path / "held_out.jsonl")}
    assert "eval.prompts" in refusal(values)


@pytest.mark.parametrize("key", ["policy", "critic", "reference"])
def test_a_missing_model_folder_is_named(values: dict, tmp_path: Path, key: str):
    values["model"][key] = str(tmp_path / "no-model")
    text = refusal(values)
    assert f"model.{key} ({tmp_path}/no-model): there is no such folder" in text


def test_a_folder_that_is_no_model_is_named(values: dict, tmp_path: Path):
    (tmp_path / "policy" / "config.json").unlink()
    assert "has no config.json" in refusal(values)


@pytest.mark.parametrize(
    ("size", "sizes", "said"),
    [
        (4, {"num_attention_heads": 6}, "must divide the 6 attention heads of model.policy"),
        (4, {"num_key_value_heads": 6, "num_attention_heads": 12}, "6 key-value heads"),
        (3, {"vocab_size": 1000, "num_attention_heads": 6}, "1024 rows of the vocabulary"),
        (4, {"intermediate_size": 90}, "90 columns of the MLP"),
        (4, {"num_key_value_heads": 2}, None),  # repeated on the devices that share them
        (8, {"vocab_size": 1000}, None),
    ],
)
def test_a_model_that_vllm_cannot_cut_is_refused(
    values: dict, tmp_path: Path, size: int, sizes: dict, said: str | None
):
    shape = {
        "hidden_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "intermediate_size": 192,
        "vocab_size": 1024,
    }
    (tmp_path / "policy" / "config.json").write_text(json.dumps(shape | sizes))
    values["rollout"] = {"engine": {"tensor_parallel": size}}
    values["placement"] = {"mode": "dedicated"}
    if said is None:
        check_inputs(PPOConfig.parse(values), on_this_machine=False)
        return
    text = refusal(values)
    assert f"rollout.engine.tensor_parallel ({size}): must divide the" in text
    assert said in text
    assert text.endswith("Set it to 2.")


def test_a_hub_id_is_left_to_the_hub_unless_it_is_offline(
    values: dict, monkeypatch: pytest.MonkeyPatch
):
    values["model"]["policy"] = "organisation/model"
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    check_inputs(PPOConfig.parse(values))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in refusal(values)


def test_a_hub_id_in_the_cache_is_usable_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        check_model("model.policy", "organisation/model")
    cached = tmp_path / "hub" / "models--organisation--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("a" * 40)
    (cached / "snapshots" / ("a" * 40)).mkdir(parents=True)
    (cached / "snapshots" / ("a" * 40) / "config.json").write_text("{}")
    check_model("model.policy", "organisation/model")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        check_model("model.policy", "no hub id")


def test_without_a_judge_the_run_is_refused(values: dict):
    values["reward"] = {}
    assert "reward.function (None): nothing scores the responses" in refusal(values)
    check_inputs(PPOConfig.parse(values), reward_fn=lambda rollouts: [])


def test_all_functions_of_a_config_are_imported_by_one_subprocess(values: dict, tmp_path: Path):
    log = tmp_path / "imports"
    (tmp_path / "mine.py").write_text(
        f"import os\nwith open({str(log)!r}, 'a') as file: print(os.getpid(), file=file)\n"
        "def judge(rollouts): return [1.0 for _ in rollouts]\n"
        "def view(step): ...\n"
    )
    mine = f"{tmp_path}/mine.py"
    values["reward"] = {"function": f"{mine}:judge"}
    values["eval"] = {**values.get("eval", {}), "function": f"{mine}:judge"}
    check_inputs(PPOConfig.parse(values | {"callbacks": [f"{mine}:view"]}))
    (pid,) = log.read_text().split()
    assert int(pid) != os.getpid()


def test_more_workers_than_cores_are_refused_with_the_sum(values: dict):
    cores = cpu_count()
    values["learner"] = {"num_workers": 2, "cpus_per_worker": cores}
    text = refusal(values)
    assert f"2 learner workers need {2 * cores} CPU cores, but this machine has {cores}" in text
    # One worker is enough for an elastic run.
    values["learner"] = {
        "num_workers": [1, 2],
        "cpus_per_worker": cores,
    }
    for lost, notes in ((0, 1), (-1, 0)):
        told = check_inputs(PPOConfig.parse(values | {"max_failures": lost}))
        assert sum("max_failures, which is 0" in note for note in told) == notes
    values["learner"]["num_workers"] = 2
    values["cluster"] = {"address": "head:6379"}  # a cluster may have more
    check_inputs(PPOConfig.parse(values))


def test_a_run_folder_with_another_config_is_refused_with_the_difference(values: dict):
    config = PPOConfig.parse(values)
    files = RunFiles(config.storage_path, config.name)
    check_run_folder(config, files)  # nothing there
    files.write_config(config.model_dump(mode="json"))
    check_run_folder(PPOConfig.parse(values | {"seed": 7}), files)  # it never made a step
    files.write(CHECKPOINTS, b"")  # killed before the line of its first step, which it restores
    with pytest.raises(ConfigError, match="seed: 0 -> 7"):
        check_run_folder(PPOConfig.parse(values | {"seed": 7}), files)
    files.append_metrics(1, {})
    check_run_folder(config, files)

    decided = config.with_dtype(use_gpu=False)  # what a run writes, where its file says auto
    files.write_config(decided.model_dump(mode="json"))
    assert (config.model.dtype, decided.model.dtype) == ("auto", "float32")
    check_run_folder(config, files)

    changed = PPOConfig.parse(values | {"seed": 7, "logging": {"tensorboard": False}})
    with pytest.raises(ConfigError) as caught:
        check_run_folder(changed, files)
    assert "seed: 0 -> 7" in str(caught.value)
    assert "--fresh" in str(caught.value)
    assert "tensorboard" not in str(caught.value)  # it changes no number


@pytest.mark.parametrize("name", ["policy", "metrics.jsonl", "checkpoint_2026"])
def test_a_folder_of_somebody_elses_is_not_written_to(values: dict, name: str):
    """Weights that another program has left under policy/ would be replaced by the run's."""
    config = PPOConfig.parse(values)
    files = RunFiles(config.storage_path, config.name)
    (files.folder / "logs").mkdir(parents=True)
    (files.folder / "train.log").touch()  # `raypo train > runs/run/train.log`
    check_run_folder(config, files)  # a run that died at its start leaves logs
    (files.folder / name).mkdir()
    with pytest.raises(ConfigError, match=rf"name \(run\): .* holds {name}, but no config\.yaml"):
        check_run_folder(config, files)


def test_only_a_run_that_says_so_is_finished(values: dict):
    config = PPOConfig.parse(values)
    files = RunFiles(values["storage_path"], values["name"])
    assert not is_finished(files, config)
    files.write_summary({"status": "interrupted", "steps": 40})
    assert not is_finished(files, config)
    files.write_summary({"status": "finished", "steps": 40})
    assert is_finished(files, config)
    assert not is_finished(files, PPOConfig.parse(values | {"num_steps": 41}))


def test_a_run_is_given_more_epochs_where_no_learning_rate_follows_from_them(values: dict):
    """`num_epochs` is only another way to say `num_steps`."""
    path = Path(values["data"]["prompts"])
    path.write_text('{"prompt": "a", "response": "b"}\n' * 8)
    sft = {key: values[key] for key in ("name", "storage_path", "model")}
    sft |= {"recipe": "sft", "data": {"prompts": str(path)}, "num_epochs": 1}
    sft["learner"] = {"batch_size": 4, "lr_schedule": "constant"}

    def of(**changes: object) -> SFTConfig:
        return with_steps_of_epochs(SFTConfig.parse(sft | changes))

    files = RunFiles(sft["storage_path"], "run")
    files.write_config(of().model_dump(mode="json"))
    files.append_metrics(2, {})
    check_run_folder(of(num_epochs=2), files)
    check_run_folder(of(num_epochs=None, num_steps=3), files)
    with pytest.raises(
        ConfigError, match=r"num_steps \(1\): the run in .* has already done 2 steps"
    ):
        check_run_folder(of(num_epochs=0.5), files)
    linear = sft["learner"] | {"lr_schedule": "linear"}
    files.write_config(of(learner=linear).model_dump(mode="json"))
    with pytest.raises(ConfigError, match="num_steps: 2 -> 4"):
        check_run_folder(of(learner=linear, num_epochs=2), files)


def test_a_run_that_its_rules_ended_is_finished_until_they_change(values: dict):
    values["stop"] = {"metric": "rollout/score_mean", "at": 0.9}
    config = PPOConfig.parse(values)
    files = RunFiles(values["storage_path"], values["name"])
    files.write_config(config.model_dump(mode="json"))
    files.write_summary({"status": "finished", "steps": 7, "stopped": "it is there"})
    assert is_finished(files, config)
    assert not is_finished(files, PPOConfig.parse(values | {"stop": {}}))


def test_the_number_of_steps_may_change_but_not_below_those_done(values: dict):
    config = PPOConfig.parse(values)
    files = RunFiles(config.storage_path, config.name)
    files.write_config(config.model_dump(mode="json"))
    files.append_metrics(5, {})
    check_run_folder(PPOConfig.parse(values | {"num_steps": 60}), files)
    check_run_folder(PPOConfig.parse(values | {"num_steps": 5}), files)
    with pytest.raises(ConfigError, match=r"num_steps \(4\): .* has already done 5 steps\. Set"):
        check_run_folder(PPOConfig.parse(values | {"num_steps": 4}), files)


def test_a_run_whose_learning_rates_follow_from_its_length_keeps_it(values: dict):
    values = {key: values[key] for key in ("name", "storage_path", "model", "data")} | {
        "recipe": "sft",
        "learner": {"lr_schedule": "cosine"},
    }
    config = SFTConfig.parse(values)
    files = RunFiles(config.storage_path, config.name)
    files.write_config(config.model_dump(mode="json"))
    files.append_metrics(5, {})
    with pytest.raises(ConfigError, match=r"num_steps: 40 -> 60\n.*learner.lr_schedule is cosine"):
        check_run_folder(SFTConfig.parse(values | {"num_steps": 60}), files)


@pytest.fixture
def checkpoint(values: dict, tmp_path: Path) -> Path:
    """Of step 3 of another run, as Ray Train and raypo leave it."""
    files = RunFiles(values["storage_path"], "earlier")
    files.write_config(PPOConfig.parse(values | {"name": "earlier"}).model_dump(mode="json"))
    folder = Path(files.location) / "checkpoint_a"
    folder.mkdir()
    (folder / "run.json").write_text('{"step": 3}')
    listed = {"checkpoint_dir_name": folder.name, "metrics": {"step": 3}}
    snapshot = {"checkpoint_results": [listed], "latest_checkpoint_result": listed}
    files.write("checkpoint_manager_snapshot.json", json.dumps(snapshot).encode())
    return folder


def beginning(values: dict, place: Path, **changes: object) -> None:
    config = PPOConfig.parse(values | {"from_checkpoint": str(place)} | changes)
    check_run_folder(config, RunFiles(config.storage_path, config.name))


def test_a_run_begins_with_a_run_its_best_or_a_checkpoint(values: dict, checkpoint: Path):
    best = checkpoint.parent / "best"
    best.mkdir()
    (best / "best.json").write_text('{"step": 3}')
    for place in (checkpoint, checkpoint.parent, best):
        assert find_checkpoint(str(place)) == str(checkpoint)
        beginning(values, place, learner={"policy_lr": 3e-6})
    (best / "best.json").write_text('{"step": 2}')
    with pytest.raises(ConfigError, match="the checkpoint of step 2 is gone"):
        beginning(values, best)
    for cut in ("", '{"checkpoint_res'):
        (checkpoint.parent / "checkpoint_manager_snapshot.json").write_text(cut)
        with pytest.raises(
            ConfigError, match=r"is truncated\. Name one of its folders: checkpoint_a\."
        ):
            beginning(values, checkpoint.parent)
    with pytest.raises(ConfigError, match=r"from_checkpoint \(.*nowhere\): there is no checkpoint"):
        beginning(values, checkpoint.parent.parent / "nowhere")
    (checkpoint / "run.json").write_text('{"step": 3')
    with pytest.raises(ConfigError, match=r"checkpoint_a: run.json is truncated"):
        beginning(values, checkpoint)


def test_a_run_begins_with_a_checkpoint_whose_model_was_named_by_an_absolute_path(
    values: dict, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, earlier = Path(values["model"]["policy"]), RunFiles(values["storage_path"], "earlier")
    record_inputs(PPOConfig.parse(values), earlier, resumes=False)
    monkeypatch.chdir(folder.parent)
    relative = values["model"] | {"policy": folder.name}
    beginning(values, checkpoint, model=relative)
    (folder / "model.safetensors").write_text("other weights")
    with pytest.raises(ConfigError, match="its run was started with another model"):
        beginning(values, checkpoint, model=relative)


def test_the_config_of_a_pbt_trial_holds_for_the_checkpoints_of_its_segments(
    values: dict, checkpoint: Path
):
    segment = checkpoint.parent / "segment_0"
    segment.mkdir()
    moved = checkpoint.rename(segment / "checkpoint_a")
    (checkpoint.parent / "segment.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"ppo.advantage \(reinforce\): .* of a run with gae"):
        beginning(values, moved, ppo={"advantage": "reinforce"})


def test_a_checkpoint_from_before_a_key_has_its_default(values: dict, checkpoint: Path):
    files = RunFiles(values["storage_path"], "earlier")
    recorded = PPOConfig.parse(values | {"name": "earlier"}).model_dump(mode="json")
    del recorded["ppo"]["advantage"]
    files.write_config(recorded)
    beginning(values, checkpoint)
    with pytest.raises(ConfigError, match=r"ppo.advantage \(reinforce\): .* of a run with gae"):
        beginning(values, checkpoint, ppo={"advantage": "reinforce"})


@pytest.mark.parametrize(
    "learner", [{"num_workers": 2}, {"critic_workers": 1}, {"zero_stage": 3}], ids=str
)
def test_a_run_goes_on_with_other_workers_and_at_another_zero_stage(
    values: dict, checkpoint: Path, learner: dict
):
    beginning(values, checkpoint, learner=learner)  # another run's state
    files = RunFiles(values["storage_path"], values["name"])
    files.write_config(PPOConfig.parse(values).model_dump(mode="json"))
    files.append_metrics(1, {})
    check_run_folder(PPOConfig.parse(values | {"learner": learner}), files)  # its own


def test_how_an_adapter_travels_is_no_part_of_a_checkpoint(values: dict, checkpoint: Path):
    values["model"] |= {"lora": {"rank": 4}}
    files = RunFiles(values["storage_path"], "earlier")
    files.write_config(PPOConfig.parse(values | {"name": "earlier"}).model_dump(mode="json"))
    for lora, told in (
        ({"push": "adapter"}, None),
        ({"rank": 8}, r"model.lora.rank \(8\): .* with 4"),
    ):
        model = values["model"] | {"lora": {"rank": 4} | lora}
        with nullcontext() if told is None else pytest.raises(ConfigError, match=told):
            beginning(values, checkpoint, model=model)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_steps": 3}, r"num_steps \(3\): from_checkpoint .* is from step 3"),
        ({"ppo": {"advantage": "reinforce"}}, r"ppo.advantage \(reinforce\): .* with gae"),
        ({"learner": {"optimizer": "muon"}}, r"learner.optimizer \(muon\): .* with adamw"),
    ],
)
def test_a_checkpoint_that_would_not_load_is_refused_before_anything_starts(
    values: dict, checkpoint: Path, changes: dict, told: str
):
    with pytest.raises(ConfigError, match=told):
        beginning(values, checkpoint, **changes)


def test_a_held_out_metric_needs_held_out_prompts(values: dict):
    for section in ({"checkpoint": {"best_by": "eval/score_mean"}}, {"stop": {"patience": 3}}):
        with pytest.raises(ConfigError, match=r"\(eval/score_mean\): .* eval.prompts is null"):
            PPOConfig.parse(values | section)


def test_prompts_that_repeat_within_a_step_are_a_note_with_both_numbers(
    values: dict, tmp_path: Path
):
    def notes() -> list[str]:
        return check_inputs(PPOConfig.parse(values), on_this_machine=False)

    values["rollout"] = {"prompts_per_step": 4, "samples_per_prompt": 8}
    row = json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(row * 3)
    assert notes() == [
        "a step takes 4 prompts (rollout.prompts_per_step), but data.prompts has only 3, so "
        "prompts repeat within a step; give more, or set rollout.prompts_per_step to at most 3"
    ]
    values["data"]["prompts"] = [str(prompts), str(prompts)]
    assert notes() == []
    values["data"]["prompts"] = [str(prompts)]
    prompts.write_text(row * 4)
    assert notes() == []
    values["rollout"] = {"prompts_per_step": 2000, "samples_per_prompt": 4}
    prompts.write_text(row * 1500)  # more than are looked at before a run
    assert notes() == []


def test_an_engine_argument_that_vllm_does_not_have_is_refused_before_anything_starts(values: dict):
    values["rollout"] = {"engine": {"extra": {"top_kk": 20}}}
    assert "rollout.engine.extra.top_kk (20): the installed vLLM has no such" in refusal(values)


def test_where_sources_have_functions_none_is_left_without(values: dict, tmp_path: Path):
    function = values["reward"].pop("function")
    path = values["data"]["prompts"]
    values["data"]["prompts"] = [{"path": path, "name": "sums", "function": function}]
    check_inputs(PPOConfig.parse(values))
    values["data"]["prompts"].append({"path": path, "name": "chats"})
    assert refusal(values) == (
        "reward.function (None): some sources have their own function, but chats of "
        "data.prompts has none. Give it one, or set reward.function, which scores all sources "
        "without their own function."
    )
    check_inputs(PPOConfig.parse(values), reward_fn=lambda rollouts: [])
    values["reward"]["function"] = function
    values["eval"] = {"prompts": path}
    check_inputs(PPOConfig.parse(values))
    check_evaluation(values["model"]["policy"], PPOConfig.parse(values))
    del values["reward"]["function"]
    values["data"]["prompts"].pop()
    values["eval"] = {"prompts": [{"path": path, "name": "sums"}]}
    check_inputs(PPOConfig.parse(values))
    values["eval"] = {"prompts": path}
    assert refusal(values) == (
        "eval.function (None): some sources have their own function, but prompts of "
        "eval.prompts has none. Give it one, or set eval.function, which scores all sources "
        "without their own function."
    )


def test_held_out_episodes_are_not_judged_by_what_trains(values: dict, tmp_path: Path):
    player = tmp_path / "player.py"
    player.write_text(
        "class Game:\n"
        "    async def reset(self, prompt, label):\n        return None\n"
        "    async def step(self, action):\n        return None, 1.0, True\n"
    )
    values["rollout"] = {"environment": f"{player}:Game", "max_episode_tokens": 64}
    function, path = values["reward"]["function"], values["data"]["prompts"]
    values["eval"] = {"prompts": [{"path": path, "name": "a", "function": function}]}
    check_inputs(PPOConfig.parse(values))
    values["eval"]["prompts"].append({"path": path, "name": "b"})
    assert refusal(values).startswith("eval.function (None): some sources have their own")
    del values["eval"]["prompts"][0]
    check_inputs(PPOConfig.parse(values))


def test_old_samples_without_a_correction_are_told_of(values: dict):
    values |= {
        "placement": {"mode": {"engine": "dedicated"}},
        "rollout": {"mode": "async", "max_staleness": 2},
    }
    (told,) = [note for note in check_inputs(PPOConfig.parse(values)) if "stale samples" in note]
    assert told.startswith("rollout.max_staleness (2): ")
    for ppo in ({"correction": {"kind": "tis"}}, {"old_log_probs": "engine"}):
        notes = check_inputs(PPOConfig.parse(values | {"ppo": ppo}))
        assert not any("stale samples" in note for note in notes)
    for rollout, start in (
        ({"mode": "async"}, "rollout.max_staleness (1): "),
        ({"mode": "one_step_off"}, "rollout.mode (one_step_off): "),
        ({"mode": "async", "max_staleness": 0}, None),
    ):
        notes = check_inputs(PPOConfig.parse(values | {"rollout": rollout}))
        told = [note for note in notes if "stale samples" in note]
        assert [note.startswith(start or "") for note in told] == [True] * (start is not None)


def test_models_that_nobody_asks_are_told_of(values: dict):
    policy = values["model"]["policy"]
    values["model"] |= {"critic": policy, "reference": policy}
    assert not any("has no effect" in each for each in check_inputs(PPOConfig.parse(values)))
    values["ppo"] = {"advantage": "grpo", "kl": {"coef": 0.0}}
    told = [each for each in check_inputs(PPOConfig.parse(values)) if "has no effect" in each]
    assert told == [
        f"model.critic ({policy}): has no effect, because ppo.advantage grpo has no critic",
        f"model.reference ({policy}): has no effect, because ppo.kl.coef is 0",
    ]


def test_a_run_recorded_before_a_key_could_be_auto_goes_on(values: dict):
    config = PPOConfig.parse(values)
    files = RunFiles(config.storage_path, config.name)
    recorded = config.model_dump(mode="json")
    recorded["learner"]["max_tokens_per_microbatch"] = 4096
    recorded["rollout"]["engine"]["sleep"] = True
    files.write_config(recorded)
    files.append_metrics(1, {})
    check_run_folder(config, files)
    given = PPOConfig.parse(values | {"learner": {"max_tokens_per_microbatch": 512}})
    with pytest.raises(ConfigError, match="max_tokens_per_microbatch: 4096 -> 512"):
        check_run_folder(given, files)


def test_a_plan_refuses_prompts_that_are_all_too_long_and_counts_some(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": "1+1=" * 20}]
    rows.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("1+1=" * 10, chat)))
    values = {
        "name": "run",
        "num_steps": 1,
        "model": {"policy": str(tiny_policy(tmp_path / "policy"))},
        "data": {"prompts": str(rows), "max_prompt_tokens": 10},
    }
    with pytest.raises(
        ConfigError, match=r"data\.max_prompt_tokens \(10\): all of the first 2 prompts .* has 80\)"
    ):
        check_prompt_lengths(PPOConfig.parse(values))
    values["data"] = {"prompts": str(rows), "max_prompt_tokens": 50}
    (note,) = check_prompt_lengths(PPOConfig.parse(values))
    assert note.startswith("1 of the first 2 prompts of data.prompts have more than 50 tokens")
    values["data"] = {"prompts": str(rows), "max_prompt_tokens": 80}
    assert check_prompt_lengths(PPOConfig.parse(values)) == []
