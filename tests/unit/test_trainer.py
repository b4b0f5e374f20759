"""What Python passes to PPOTrainer wins over the file; what Ray makes up does not."""

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
import torch
import yaml
from ray.train import (
    Checkpoint,
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
)

from raypo.checks.row_checks import with_steps_of_epochs
from raypo.cluster.hardware import Node
from raypo.cluster.placement import PlacementError
from raypo.config import ConfigError, DPOConfig, PPOConfig, SFTConfig
from raypo.config.sweep_config import with_values
from raypo.ray_internals import CHECKPOINTS
from raypo.run.records import report_for_ray
from raypo.storage.run_files import RunFiles
from raypo.trainer import PPOTrainer, SFTTrainer, settings
from raypo.trainer import trainer as trainer_module
from raypo.trainer.settings import CONTROLLER_FAILURE_LIMIT, resolve, run_config_of, scaling_of
from tests.tiny import tiny_policy


def config() -> PPOConfig:
    return PPOConfig.parse(
        {
            "name": "from-file",
            "storage_path": "/from/file",
            "model": {"policy": "p"},
            "data": {"prompts": "d.jsonl"},
        }
    )


@pytest.mark.parametrize(("use_gpu", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_the_dtype_is_decided_where_the_devices_are_known(use_gpu: bool, dtype: str):
    """On GPUs attention computes float32 in TF32: engine and learner could not agree in it."""
    assert config().model.dtype == "auto"
    assert config().with_dtype(use_gpu=use_gpu).model.dtype == dtype
    own = config().model_copy(update={"model": config().model.model_copy(update={"dtype": "x"})})
    assert own.with_dtype(use_gpu=use_gpu) == own, "what the file says stays"


def test_what_ray_makes_up_leaves_the_file_alone():
    resolved = resolve(config(), None, RunConfig(failure_config=FailureConfig()))
    assert (resolved.name, resolved.storage_path) == ("from-file", "/from/file")


def test_name_storage_workers_and_function_from_python_win():
    resolved = resolve(
        config(),
        ScalingConfig(num_workers=3, use_gpu=True, resources_per_worker={"CPU": 4, "GPU": 1}),
        RunConfig(name="mine", storage_path="s3://bucket/runs"),
        len,  # type: ignore[arg-type]
    )
    assert (resolved.name, resolved.storage_path) == ("mine", "s3://bucket/runs")
    assert resolved.learner.num_workers == 3
    assert resolved.learner.use_gpu is True
    assert resolved.learner.cpus_per_worker == 4
    assert resolved.reward.function == "builtins:len"


def test_workers_of_a_critic_are_counted_by_ray_with_the_others():
    apart = PPOConfig.parse({**config().model_dump(), "learner": {"critic_workers": 2}})
    assert scaling_of(resolve(apart, None, None), None).num_workers == 3
    given = ScalingConfig(num_workers=6)
    assert resolve(apart, given, None).learner.num_workers == 4
    assert scaling_of(resolve(apart, given, None), given).num_workers == 6
    with pytest.raises(ConfigError, match=r"ScalingConfig.num_workers \(2\): .* 3 or more"):
        resolve(apart, ScalingConfig(num_workers=2), None)


def test_labels_and_accelerator_types_from_python_reach_the_learners_bundles():
    given = ScalingConfig(
        num_workers=2,
        use_gpu=True,
        label_selector={"tier": "gold"},
        accelerator_type="H100",
        resources_per_worker={"CPU": 1, "GPU": 1},
    )
    labels = {"tier": "gold", "ray.io/accelerator-type": "H100"}
    resolved = resolve(config(), given, None)
    assert resolved.placement.label_selector == labels, "recorded, and for dedicated roles too"
    scaling = scaling_of(resolved, given)
    assert scaling.label_selector == labels
    assert scaling.additional_resources_per_worker == {}, "the type is asked for once, as a label"
    values = config().model_dump()
    values["placement"] |= {"mode": "dedicated", "label_selector": {"engine": {"tier": "silver"}}}
    apart = resolve(PPOConfig.parse(values), given, None).placement
    assert apart.labels_of("learner") == labels
    assert apart.labels_of("engine") == {"tier": "silver"}
    each = ScalingConfig(num_workers=2, label_selector=[{"tier": "gold"}, {"tier": "silver"}])
    with pytest.raises(ConfigError, match=r"^ScalingConfig.label_selector \(.*Give one mapping"):
        resolve(config(), each, None)


def test_elastic_workers_of_python_and_of_a_file_are_the_same():
    given = ScalingConfig(num_workers=(1, 4), elastic_resize_monitor_interval_s=5.0)
    of_python = resolve(config(), given, None)
    of_file = PPOConfig.parse({**config().model_dump(), "learner": {"num_workers": [1, 4]}})
    for each in (of_python, of_file):
        assert (each.learner.min_workers, each.learner.num_workers) == (1, 4)
        assert PPOConfig.parse(each.model_dump()) == each
    assert scaling_of(of_python, given).elastic_resize_monitor_interval_s == 5.0
    assert scaling_of(of_file, None).num_workers == (1, 4)
    fixed = ScalingConfig(num_workers=3)
    assert resolve(of_file, fixed, None).learner.min_workers is None
    one = of_file.with_workers(1)
    assert (one.learner.num_workers, one.learner.is_elastic) == (1, False)


@pytest.mark.parametrize(
    ("count", "changes", "told"),
    [
        ((0, 4), {}, r"learner.min_workers \(0\): "),
        (
            (1, 2),
            {"learner": {"critic_workers": 1}},
            r"learner.critic_workers \(1\): needs a fixed number",
        ),
        (
            (1, 2),
            {"placement": {"mode": "dedicated"}},
            r"learner.min_workers \(1\): .* the dedicated group as free",
        ),
        (
            (2, 4),
            {"learner": {"num_workers": 4}, "rollout": {"engine": {"tensor_parallel": 2}}},
            r"learner.num_workers \(\[2, 4\]\) with 3: rollout.engine.tensor_parallel \(2\): must",
        ),
        (
            (1, 4),
            {"learner": {"num_workers": 4}, "rollout": {"engine": {"count": 2}}},
            r"\(\[1, 4\]\) with 1: rollout.engine.count \(2\)",
        ),
    ],
)
def test_elastic_workers_that_could_not_go_on_are_refused_before_anything_starts(
    values: dict[str, Any], count: Any, changes: dict[str, Any], told: str
):
    tiny_policy(values["model"]["policy"])
    scaling = ScalingConfig(num_workers=count)
    with pytest.raises(ConfigError, match=told):
        PPOTrainer(PPOConfig.parse(values | changes), reward_funcs=judge, scaling_config=scaling)


def test_a_model_that_vllm_cannot_run_on_cpus_is_refused_before_anything_starts(
    values: dict[str, Any],
):
    folder = tiny_policy(values["model"]["policy"])
    told = (
        f"model.policy ({folder}): vLLM has no kernels for the architecture gpt_oss on CPUs, but "
        "the run has no GPUs. Run it on GPUs, or give a model of another architecture."
    )
    written = json.loads((folder / "config.json").read_text()) | {"model_type": "gpt_oss"}
    (folder / "config.json").write_text(json.dumps(written))
    assert refusal(values, reward_funcs=judge) == told
    PPOTrainer(
        PPOConfig.parse(values), reward_funcs=judge, scaling_config=ScalingConfig(use_gpu=True)
    )


def test_what_is_seldom_meant_is_said_before_anything_starts(
    values: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    """Nothing listens at the address, so this is as far as it comes."""
    tiny_policy(values["model"]["policy"])
    old_as_new = {
        "rollout": {"mode": "async", "max_staleness": 1},
        "placement": {"mode": "dedicated"},
        "cluster": {"address": "127.0.0.1:1"},
    }
    trainer = PPOTrainer(PPOConfig.parse(values | old_as_new), reward_funcs=judge)
    with pytest.raises(ConfigError, match="nothing listens there"):
        trainer.fit()
    assert "Note: rollout.max_staleness (1): stale samples are trained on as if" in (
        capsys.readouterr().out
    )


def test_gpus_that_are_asked_for_and_that_torch_cannot_use_are_refused_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(settings, "this_machine", lambda: [Node("this machine", gpus=2)])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    asked = resolve(config(), ScalingConfig(num_workers=1, use_gpu=True), None)
    with pytest.raises(ConfigError, match=r"^learner\.use_gpu \(True\): this machine has 2 GPUs"):
        scaling_of(asked, None)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert scaling_of(asked, None).use_gpu, "the GPUs are the cluster's, and its workers look"


def test_a_start_that_can_never_succeed_is_not_tried_for_ever(tmp_path: Path):
    given = RunConfig(failure_config=FailureConfig(max_failures=5))
    run = run_config_of(resolve(config(), None, given), given)
    assert run.failure_config is not None
    assert run.failure_config.max_failures == 5
    assert run.failure_config.controller_failure_limit == CONTROLLER_FAILURE_LIMIT
    assert run.checkpoint_config is not None
    assert run.checkpoint_config.num_to_keep == 2


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run file whose input is all there."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    rows = [{"prompt": "1+1=", "response": "2"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "run",
        "storage_path": str(tmp_path / "runs"),
        "model": {"policy": str(tmp_path / "policy")},
        "data": {"prompts": str(tmp_path / "prompts.jsonl")},
        "learner": {"use_gpu": False},
    }


def judge(rollouts: list[Any]) -> list[float]:
    return [0.0 for _ in rollouts]


class Judge:
    def __call__(self, rollouts: list[Any]) -> list[float]:
        return judge(rollouts)


class AskedWithTwo:
    def __call__(self, prompt: str, response: str) -> float:
        return 0.0


def refusal(values: dict[str, Any], **arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        PPOTrainer(PPOConfig.parse(values), **arguments)
    return str(caught.value)


def test_failures_of_the_file_count_and_those_of_python_win():
    file = config().model_copy(update={"max_failures": 3})
    assert resolve(file, None, RunConfig(name="other")).max_failures == 3
    python = RunConfig(failure_config=FailureConfig(max_failures=-1))
    resolved = resolve(file, None, python)
    assert resolved.max_failures == -1
    for given in (None, RunConfig(), python):
        ray_config = run_config_of(resolved, given).failure_config
        assert ray_config is not None
        assert ray_config.max_failures == -1


def test_the_number_of_checkpoints_from_python_is_recorded_and_kept():
    given = RunConfig(
        checkpoint_config=CheckpointConfig(
            num_to_keep=1, checkpoint_score_attribute="kl/ref_mean", checkpoint_score_order="min"
        )
    )
    resolved = resolve(config(), None, given)
    assert resolved.checkpoint.keep == 1
    assert (resolved.checkpoint.best_by, resolved.checkpoint.best_mode) == ("kl/ref_mean", "min")
    kept = run_config_of(resolved, given).checkpoint_config
    assert kept is not None
    assert (kept.num_to_keep, kept.checkpoint_score_order) == (1, "max")
    told = report_for_ray(3, {"kl/ref_mean": 0.25}, resolved.checkpoint)
    assert told[str(kept.checkpoint_score_attribute)] == -0.25


@pytest.mark.parametrize(
    ("reward_fn", "said"),
    [
        (lambda prompt, response: 0.0, "but it has the parameters (prompt, response)"),
        (AskedWithTwo(), "but it has the parameters (prompt: str, response: str)"),
        (Judge, "it is a class, not a function"),
    ],
)
def test_a_reward_fn_that_cannot_be_called_with_rollouts_is_refused_at_once(
    values: dict[str, Any], reward_fn: Any, said: str
):
    text = refusal(values, reward_funcs=reward_fn)
    assert text.startswith("reward_funcs (")
    assert said in text
    assert "Give a function" in text


@pytest.mark.parametrize("reward_fn", [judge, Judge(), lambda rollouts, scale=1.0: []])
def test_functions_and_callable_objects_are_taken_and_recorded(
    values: dict[str, Any], reward_fn: Any
):
    recorded = PPOTrainer(PPOConfig.parse(values), reward_funcs=reward_fn).config.reward.function
    assert recorded is not None
    assert recorded.startswith(f"{__name__}:")


def test_epochs_become_the_steps_that_they_take(values: dict[str, Any], tmp_path: Path):
    path = tmp_path / "examples.jsonl"
    path.write_text('{"prompt": "a", "response": "b"}\n' * 10)
    sft = {
        "recipe": "sft",
        "name": "sft",
        "model": {"policy": values["model"]["policy"]},
        "data": {"prompts": str(path)},
        "learner": {"batch_size": 4},
        "num_epochs": 1.5,
    }
    assert SFTTrainer(SFTConfig.parse(sft)).config.num_steps == 4
    with_pairs = path.with_name("pairs.jsonl")
    with_pairs.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 10)
    kto = sft | {"recipe": "dpo", "data": {"prompts": str(with_pairs)}, "dpo": {"loss": "kto"}}
    assert with_steps_of_epochs(DPOConfig.parse(kto)).num_steps == 8  # a pair is two verdicts
    recorded = SFTTrainer(SFTConfig.parse(sft)).config.model_dump()
    assert SFTTrainer(SFTConfig.parse(recorded)).config.num_steps == 4
    with pytest.raises(ConfigError, match=r"num_steps \(7\).*are 4 steps"):
        SFTTrainer(SFTConfig.parse(sft | {"num_steps": 7}))
    sft["learner"]["lr_warmup_steps"] = 3
    SFTTrainer(SFTConfig.parse(sft))
    sft["learner"]["lr_warmup_steps"] = 4
    with pytest.raises(ConfigError, match=r"lr_warmup_steps \(4\): .* 4 steps \(num_epochs\)"):
        SFTTrainer(SFTConfig.parse(sft))


def test_what_is_no_config_of_the_recipe_is_refused(values: dict[str, Any], tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config \(list\): must be a PPOConfig, a mapping of"):
        PPOTrainer([values])  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"config \(Qwen/x\): .* or pass the model as model='Qwen/x'"
    ):
        PPOTrainer("Qwen/x")
    sft = SFTConfig.parse({**values, "recipe": "sft"})
    with pytest.raises(ConfigError, match=r"config \(SFTConfig\): must be a PPOConfig"):
        PPOTrainer(sft)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"judge\): this recipe trains on given rows, so no samples are scored"
    ):
        SFTTrainer(sft, reward_funcs=judge)
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump({**values, "recipe": "sft"}))
    with pytest.raises(ConfigError, match="recipe"):
        PPOTrainer(path)


@pytest.mark.parametrize(
    ("argument", "value", "remedy"),
    [
        ("dataset_config", DataConfig(), "data"),
        ("validation_config", ValidationConfig(fn=lambda checkpoint, **kwargs: {}), "eval.prompts"),
        ("metadata", {"a": 1}, "run folder"),
        ("resume_from_checkpoint", Checkpoint("/tmp"), "storage_path"),
        ("train_loop_per_worker", judge, "TorchTrainer"),
        ("train_loop_config", {"lr": 1.0}, "first argument"),
    ],
)
def test_arguments_of_torch_trainer_that_could_not_act_are_refused(
    values: dict[str, Any], argument: str, value: Any, remedy: str
):
    text = refusal(values, reward_funcs=judge, **{argument: value})
    assert text.startswith(f"{argument} ({type(value).__name__}): ")
    assert remedy in text


def test_devices_and_file_systems_that_raypo_does_not_reach_are_refused(values: dict[str, Any]):
    tpus = ScalingConfig(num_workers=1, use_tpu=True)
    assert "ScalingConfig.use_tpu (True)" in refusal(
        values, reward_funcs=judge, scaling_config=tpus
    )
    own = RunConfig(storage_filesystem=pyarrow.fs.LocalFileSystem())
    assert re.match(
        r"RunConfig.storage_filesystem \(LocalFileSystem\): .* Give storage_path as a URI",
        refusal(values, reward_funcs=judge, run_config=own),
    )


SCRIPT = """
from raypo import PPOConfig, PPOTrainer


def seen(step):
    return {{}}


def judge(rollouts):
    return [0.0 for _ in rollouts]


{guard}    PPOTrainer(PPOConfig.parse({values}), reward_funcs=judge).fit()
"""


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        (
            "if True:\n",
            r"script\.py:seen: a run imports this file, but the file itself starts a run\. Put",
        ),
        ('if __name__ == "__main__":\n', "nothing listens there"),
    ],
)
def test_a_script_that_its_workers_import_must_not_start_the_run_there(
    values: dict[str, Any], tmp_path: Path, guard: str, said: str
):
    tiny_policy(values["model"]["policy"])
    script = tmp_path / "script.py"
    values |= {"callbacks": f"{script}:seen", "cluster": {"address": "127.0.0.1:1"}}
    script.write_text(SCRIPT.format(guard=guard, values=values))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert re.search(said, done.stderr.splitlines()[-1])
    assert not (tmp_path / "runs" / "run" / "config.yaml").exists()


def run_before(values: dict[str, Any], *, seed: int) -> RunFiles:
    """A run of this config that made one step."""
    earlier = PPOTrainer(PPOConfig.parse({**values, "seed": seed}), reward_funcs=judge)
    files = RunFiles(values["storage_path"], values["name"])
    files.write_config(earlier.config.model_dump(mode="json"))
    files.append_metrics(1, {"rollout/score_mean": 0.0})
    return files


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray
def test_a_run_that_was_killed_in_its_first_step_gets_its_list_of_checkpoints_mended(
    values: dict[str, Any],
):
    """It has a checkpoint, but not yet a line of metrics."""
    trainer = PPOTrainer(PPOConfig.parse(values), reward_funcs=judge)
    assert trainer._mend_list() is None
    files = RunFiles(values["storage_path"], values["name"])
    state = json.dumps({"step": 1, "metrics": {"x": 0.5}})
    files.write("checkpoint_1/run.json", state.encode())
    files.write(CHECKPOINTS, b"")
    assert "was rewritten, because it is truncated" in (trainer._mend_list() or "")
    assert json.loads(files.read(CHECKPOINTS) or b"")["latest_checkpoint_result"]


def test_python_is_told_how_python_starts_over(values: dict[str, Any]):
    run_before(values, seed=7)
    with pytest.raises(ConfigError, match=r"or start over with fresh=True\.$"):
        PPOTrainer(PPOConfig.parse(values), reward_funcs=judge).fit()


def raising(error: Exception) -> Any:
    def refuse(*arguments: Any, **others: Any) -> None:
        raise error

    return refuse


def test_fresh_removes_the_run_that_is_there_only_once_ray_has_started(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Nothing listens at the address; then the cluster is too small; then the run is tried."""
    tiny_policy(values["model"]["policy"])
    files = run_before(values, seed=7)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    elsewhere = PPOConfig.parse({**values, "cluster": {"address": address}})
    with pytest.raises(ConfigError, match="holds a run with another config"):
        PPOTrainer(elsewhere, reward_funcs=judge).fit()
    with pytest.raises(ConfigError, match="nothing listens there"):
        PPOTrainer(elsewhere, reward_funcs=judge, fresh=True).fit()
    recorded = files.config()
    again = PPOTrainer(elsewhere, reward_funcs=judge, fresh=True)
    monkeypatch.setattr(trainer_module, "connect", lambda cluster: False)
    monkeypatch.setattr(again, "_check_cluster", raising(PlacementError("no room")))
    with pytest.raises(PlacementError, match="no room"):
        again.fit()
    assert (files.config(), files.last_step()) == (recorded, 1)
    monkeypatch.setattr(again, "_check_cluster", lambda: None)
    monkeypatch.setattr(
        trainer_module, "start_monitor", raising(RuntimeError("as far as it comes"))
    )
    with pytest.raises(RuntimeError, match="as far as it comes"):
        again.fit()
    assert (files.config(), files.last_step()) == (again.config.model_dump(mode="json"), 0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"model.policy": "policy"},
            r"model\.policy \(.*/runs/run/policy\): starting over removes",
        ),
        ({"from_checkpoint": ""}, r"from_checkpoint \(.*/runs/run\): starting over removes"),
        ({"from_checkpoint": "../other"}, r"from_checkpoint \(.*other\): there is no checkpoint"),
    ],
)
def test_fresh_refuses_what_it_would_remove_itself_or_could_not_begin_with(
    values: dict[str, Any], changes: dict[str, str], told: str
):
    files = run_before(values, seed=7)
    tiny_policy(values["model"]["policy"])
    shutil.copytree(values["model"]["policy"], files.folder / "policy")
    for key, place in changes.items():
        values = with_values(values, {key: str(files.folder / place)})
    with pytest.raises(ConfigError, match=told):
        PPOTrainer(PPOConfig.parse(values), reward_funcs=judge, fresh=True).fit()
    assert files.last_step() == 1


def test_a_summary_that_cannot_be_written_does_not_hide_why_the_run_ended(
    tmp_path: Path, values: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    tiny_policy(values["model"]["policy"])
    trainer = PPOTrainer(PPOConfig.parse(values), reward_funcs=judge)
    folder = Path(trainer._files.location)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("a file, so that nothing can be written below it")
    trainer._write_summary("failed", 1.0)
    assert "warning: summary.json could not be written: " in capsys.readouterr().out
