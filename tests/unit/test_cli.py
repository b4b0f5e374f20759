"""The command's exit status, and that wrong input is told before anything heavy is imported."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import raypo.cli
from raypo.cli.exit_status import _report_failure
from raypo.config import RECIPES, ConfigError, PPOConfig, SFTConfig
from raypo.rewards.scoring import RewardError
from raypo.storage.run_files import RunFiles
from tests.command_line import exit_status
from tests.recorded_run import write_run

HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "plotly")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ppo.yaml"
    path.write_text("name: run\nmodel: {policy: none/such/folder}\ndata: {prompts: no.jsonl}\n")
    return path


def test_a_typo_in_an_override_is_status_2_with_the_nearest_key(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert exit_status(monkeypatch, "train", config, "ppo.kl.cof=0.02") == 2
    assert "Did you mean ppo.kl.coef?" in capsys.readouterr().err


def test_a_missing_config_is_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert exit_status(monkeypatch, "train", "nowhere.yaml") == 2
    assert "nowhere.yaml: there is no such file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["sweep", "plan"])
def test_a_constraint_that_no_trial_can_log_is_status_2(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    base = tmp_path / "ppo.yaml"
    base.write_text(
        "name: run\nmodel: {policy: none}\ndata: {prompts: no.jsonl}\neval: {prompts: no.jsonl}\n"
        "reward: {function: no.py:score}\n"
    )
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(
        f"name: s\nbase: {base}\nspace: {{seed: {{choice: [0, 1]}}}}\n"
        "constraint: rollout/score_men >= 0\n"
    )
    assert exit_status(monkeypatch, command, sweep) == 2
    assert "Did you mean rollout/score_mean?" in capsys.readouterr().err


def test_a_missing_model_is_status_2(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert exit_status(monkeypatch, "train", config) == 2
    assert "model.policy (none/such/folder)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["none/such/folder"], "MODEL (none/such/folder): there is no such folder"),
        ([".", "--host", "0.0.0.0"], "Set the environment variable RAYPO_API_KEY"),
        ([".", "--", "--host", "0.0.0.0"], "-- (--host): raypo itself sets where"),
        ([".", "--", "--host=0.0.0.0"], "Use --host HOST before `--`."),
        ([".", "--", "--dtype", "half", "--hos=::"], "-- (--hos=::): raypo itself sets"),
        ([".", "--", "--port", "80"], "Use --port PORT before `--`."),
        ([".", "--", "--ud", "socket"], "-- (--ud): raypo itself sets"),
        ([".", "--", "--api_key", "key"], "Use the environment variable RAYPO_API_KEY"),
        ([".", "--", "--hf-token", "--pooler-config=x"], "the folder has no config.json"),
        ([".", "--dtype", "int8"], "Invalid value for '--dtype'"),
        ([".", "--kv-cache-gb", "0"], "Invalid value for '--kv-cache-gb'"),
        (["."], "the folder has no config.json"),
    ],
)
def test_serve_refuses_before_a_model_loads(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAYPO_API_KEY", raising=False)
    assert exit_status(monkeypatch, "serve", *arguments) == 2
    assert told in capsys.readouterr().err


def test_plan_lists_the_recipes_where_an_override_names_none_of_them(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert exit_status(monkeypatch, "plan", config, "recipe=dppo") == 2
    told = capsys.readouterr().err
    assert f"recipe ('dppo'): must be {', '.join(RECIPES)}. Did you mean ppo?" in told


def test_the_folder_of_a_finished_run_is_taken_for_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "reward.py").write_text("def score(rollouts):\n    return []\n")
    (tmp_path / "config.json").write_text("{}")
    run = PPOConfig.parse(
        {
            "name": "mine",
            "num_steps": 2,
            "model": {"policy": str(tmp_path)},
            "data": {"prompts": str(tmp_path / "prompts.jsonl")},
            "reward": {"function": f"{tmp_path}/reward.py:score"},
        }
    )
    files = RunFiles(str(tmp_path / "runs"), "mine")
    files.write_config(run.model_dump(mode="json"))
    files.append_metrics(2, {"train/loss": 0.1})
    files.write_summary({"status": "finished", "steps": 2})
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:99999")  # its cluster is gone
    monkeypatch.setattr("raypo.checks.input_checks.check_disk", None)  # and its disk is full
    assert exit_status(monkeypatch, "train", tmp_path / "runs" / "mine") == 0
    assert f"mine is finished, files in {files.location}" in capsys.readouterr().out
    assert exit_status(monkeypatch, "train", tmp_path / "runs" / "mine", "num_steps=3") == 2
    assert "RAY_ADDRESS (127.0.0.1:99999)" in capsys.readouterr().err


def test_a_storage_path_that_is_a_file_is_refused_before_anything_heavy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "examples.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 5)
    (tmp_path / "config.json").write_text("{}")
    values = {
        "recipe": "sft",
        "name": "mine",
        "num_steps": 2,
        "storage_path": str(tmp_path / "config.json"),
        "model": {"policy": str(tmp_path)},
        "data": {"prompts": str(tmp_path / "examples.jsonl")},
    }
    file = tmp_path / "sft.yaml"
    file.write_text(json.dumps(values))
    monkeypatch.delattr("raypo.trainer.trainer_for")
    assert exit_status(monkeypatch, "train", file) == 2
    assert f"storage_path ({tmp_path / 'config.json'}): " in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_finished_run_of_epochs_is_known_by_its_steps(
    schedule: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """A higher num_steps is named only where it would not be refused."""
    (tmp_path / "examples.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n' * 5)
    (tmp_path / "config.json").write_text("{}")
    values = {
        "recipe": "sft",
        "name": "mine",
        "num_epochs": 2,
        "storage_path": str(tmp_path / "runs"),
        "model": {"policy": str(tmp_path)},
        "data": {"prompts": str(tmp_path / "examples.jsonl")},
        "learner": {"batch_size": 2, "lr_schedule": schedule},
    }
    file = tmp_path / "sft.yaml"
    file.write_text(json.dumps(values))
    files = RunFiles(str(tmp_path / "runs"), "mine")
    files.write_config(SFTConfig.parse(values | {"num_steps": 5}).model_dump(mode="json"))
    files.append_metrics(5, {"train/loss": 0.1})
    files.write_summary({"status": "finished", "steps": 5})
    assert exit_status(monkeypatch, "train", file) == 0
    out = capsys.readouterr().out
    assert "mine is finished" in out
    assert "--fresh starts over" in out
    assert ("a higher num_steps continues it" in out) == (schedule == "constant")


def test_what_a_worker_refuses_at_its_start_is_told_without_its_traceback(
    capsys: pytest.CaptureFixture[str],
):
    """Ray hands it on as an error of a task, and Ray Train as one of its controller."""
    from ray.exceptions import RayTaskError
    from ray.train import ControllerError

    cause = ConfigError("learner.use_gpu (True): a worker on 10.0.0.3 has 1 GPU")
    told = RayTaskError("execute", "a traceback", cause).as_instanceof_cause()
    assert _report_failure(ControllerError(told)) == 2
    assert capsys.readouterr().err == f"raypo: {cause}\n"
    assert _report_failure(ControllerError(RuntimeError("no room"))) == 1
    assert "no room" in capsys.readouterr().err


def test_an_error_of_the_users_code_is_told_by_the_users_lines_alone(
    capsys: pytest.CaptureFixture[str],
):
    import pickle

    from ray.train import WorkerGroupError
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

    from raypo.trainer.watch import with_user_frames

    error = RewardError("the reward function f raised KeyError: 'x'.")
    error.user_frames, error.log = '  File "f.py", line 2, in f\n    row["x"]\n', "worker_0.log"
    failures: dict[int, Exception] = {
        0: UserExceptionWithTraceback(pickle.loads(pickle.dumps(error)), "sixty lines")
    }
    failed = WorkerGroupError("sixty lines", failures)
    assert _report_failure(failed) == 1
    line = f"{error} The whole traceback: worker_0.log"
    assert capsys.readouterr().err == f"{error.user_frames}raypo: {line}\n"
    brief = with_user_frames(failed)
    assert str(brief).endswith(f"\n{error.user_frames}{line}")
    assert brief.worker_failures is failures
    others = WorkerGroupError("sixty lines", {0: RuntimeError("CUDA")})
    assert with_user_frames(others) is others


def test_an_unknown_command_is_status_2(monkeypatch: pytest.MonkeyPatch):
    assert exit_status(monkeypatch, "trian") == 2


ALL_IN_ONE = """
import contextlib, io, json, sys
import raypo.cli
told = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["raypo", *arguments]
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            raypo.cli.main()
        except SystemExit as ended:
            told.append([ended.code, out.getvalue(), error.getvalue()])
print(json.dumps([told, [name for name in %r if name in sys.modules]]))
"""
"""Runs commands one after the other in an interpreter that has imported nothing else."""


def run_light(*commands: list[str]) -> list[tuple[int, str, str]]:
    """Status, output and error of each command, which imported nothing heavy."""
    done = subprocess.run(
        [sys.executable, "-c", ALL_IN_ONE % (HEAVY,), json.dumps(commands)],
        capture_output=True,
        text=True,
        check=True,
    )
    told, heavy = json.loads(done.stdout)
    assert heavy == []
    return [(status or 0, out, error) for status, out, error in told]


def test_what_is_wrong_and_what_fits_is_told_without_importing_anything_heavy(
    config: Path, tmp_path: Path
):
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(f"name: s\nbase: {config}\nspace: {{ppo.kl.cof: {{uniform: [0, 1]}}}}\n")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "vocab_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(sizes | heads))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "reward.py").write_text("def score(rollouts):\n    return []\n")
    good = tmp_path / "good.yaml"
    good.write_text(
        f"name: run\nmodel: {{policy: {tmp_path}}}\ndata: {{prompts: {tmp_path}/prompts.jsonl}}\n"
        f"reward: {{function: '{tmp_path}/reward.py:score'}}\n"
    )
    plan = ["plan", str(good), "seed=3", "--cluster"]

    no_model, no_run, no_key, fits, no_memory, no_gpu = run_light(
        ["train", str(config)],
        ["report", str(tmp_path)],
        ["sweep", str(sweep)],
        [*plan, "4xCPU,16G"],
        [*plan, "4xCPU,2G"],
        [*plan, "4xGPU"],
    )

    assert no_model[0] == 2
    assert "model.policy (none/such/folder)" in no_model[2]
    assert no_run[0] == 2
    assert "there is no run" in no_run[2]
    assert no_key[0] == 2
    assert "Did you mean ppo.kl.coef?" in no_key[2]
    assert fits[0] == 0, fits[2]
    assert "run fits." in fits[1]
    assert "Note: a step takes 32 prompts (rollout.prompts_per_step), but data" in fits[1]
    assert no_memory[0] == 2
    assert "memory (node 0 RAM): needs" in no_memory[2]
    assert no_gpu[0] == 2
    assert "run fits." not in no_gpu[1]


@pytest.mark.parametrize(
    ("variable", "value"), [("RAY_TMPDIR", "/proc/none"), ("RAY_ADDRESS", "127.0.0.1:99999")]
)
def test_what_ray_lacks_on_this_machine_is_told_first_and_without_importing_anything_heavy(
    variable: str, value: str, config: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv(variable, value)
    ((status, _, error),) = run_light(["train", str(config)])
    assert status == 2
    assert error.startswith(f"raypo: {variable} ({value}): ")


def test_status_reads_runs_below_a_folder_or_one_of_them_without_anything_heavy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(raypo.__file__).parents[1]))
    for name in ("first", "second"):
        write_run(tmp_path / "runs", name, steps=2, with_rollouts=False)
    (tmp_path / "runs" / "notes.txt").write_text("no run")
    both, one, by_uri, none, empty = run_light(
        ["status"],
        ["status", "runs/first"],
        ["status", (tmp_path / "runs" / "first").as_uri()],
        ["status", "elsewhere"],
        ["status", "runs/first/policy"],
    )
    assert both[0] == 0, both[2]
    head, *lines = both[1].splitlines()
    assert head.split() == ["run", "recipe", "status", "step", "score", "last", "a", "step"]
    assert sorted(line.split()[0] for line in lines) == ["first", "second"]
    assert one[1].startswith("first: ppo, finished, step 2 of 12\n")
    assert "  go on      raypo report runs/first\n" in one[1]
    assert by_uri[1].startswith("first: ppo, finished, step 2 of 12\n")
    assert (none[0], empty[0]) == (2, 2)
    assert none[2].startswith(
        "raypo: RUN (elsewhere): there is neither a run nor a folder of runs."
    )


def test_export_copies_the_merged_model_or_the_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    run = tmp_path / "run"
    for name in ("policy", "adapter"):
        (run / name).mkdir(parents=True)
        (run / name / "config.json").write_text(name)
    for flags, name in (((), "policy"), (("--adapter",), "adapter")):
        to = tmp_path / f"out-{name}"
        assert exit_status(monkeypatch, "export", run, "--to", to, *flags) == 0
        assert (to / "config.json").read_text() == name
    (run / "adapter" / "config.json").unlink()
    (run / "adapter").rmdir()
    assert exit_status(monkeypatch, "export", run, "--to", tmp_path / "x", "--adapter") == 2
    assert "Give the folder of a run with model.lora" in capsys.readouterr().err


def test_eval_makes_the_folder_of_its_figures_before_it_samples(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    to = tmp_path / "not" / "there" / "eval.json"

    def sampled(*_: object) -> dict[str, dict[str, float]]:
        assert to.parent.is_dir()
        means = {"eval/score_mean": 0.5, "eval/reward_model_mean": math.nan}
        return {"held_out": {"eval/prompts": 1.0, **means}}

    for check in ("checks.input_checks.check_evaluation", "models.loading.check_tokens"):
        monkeypatch.setattr(f"raypo.{check}", lambda *_, **__: None)
    logs: list[Path] = []
    monkeypatch.setattr("raypo.tracking.logs.log_to_file", lambda path: logs.append(Path(path)))
    monkeypatch.setattr("raypo.rollout.standalone_evaluation.evaluate_model", sampled)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a folder of all users
    assert exit_status(monkeypatch, "eval", "model", "--config", config, "--to", to) == 0
    written = json.loads(to.read_text())["results"]["held_out"]
    assert (written["eval/score_mean"], written["eval/reward_model_mean"]) == (0.5, None)
    (log,) = logs
    assert log.stat().st_mode & 0o777 == 0o600
    assert str(os.getpid()) not in log.name  # nobody can make a link of this name before


def test_ctrl_c_says_that_a_command_resumes_only_where_it_does(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raypo.config.load_run_config", interrupted)
    monkeypatch.setattr("os._exit", sys.exit)
    for arguments, told in (
        (["train", config], "stopped at once; the same command resumes from the last checkpoint."),
        (["eval", "model", "--config", config], "stopped at once."),
    ):
        assert exit_status(monkeypatch, *arguments) == 130
        assert capsys.readouterr().err == f"raypo: {told}\n"


def test_config_prints_a_key_as_the_reference_has_it(capsys: pytest.CaptureFixture[str]):
    from raypo.cli.explain import explain

    explain("ppo.minibatch_size")
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith(
        "ppo.minibatch_size integer ≥ 1; default 32 Responses per optimizer step"
    )
    explain("ppo.preset")
    assert "  dapo: advantage: grpo, clip_high: 0.28" in capsys.readouterr().out
    explain("model.lora")
    section = capsys.readouterr().out
    assert "model.lora.rank   integer ≥ 1; default 16" in section
    explain(None)
    first = capsys.readouterr().out
    assert first.index("model.policy") < first.index("rollout.prompts_per_step")


def test_config_of_a_wrong_key_names_the_right_one(capsys: pytest.CaptureFixture[str]):
    from raypo.cli.explain import explain

    with pytest.raises(typer.Exit):
        explain("num_generations")
    assert "Set rollout.samples_per_prompt instead" in capsys.readouterr().err
    with pytest.raises(typer.Exit):
        explain("dpo.beta")
    explain("dpo.beta", recipe="dpo")
    assert "Factor on the log-ratio" in capsys.readouterr().out
    for wrong, remedy in (
        ("ppo.kl.coef.x", "`raypo config` prints the keys and sections that there are."),
        ("quux", "`raypo config` prints the keys and sections that there are."),
    ):
        capsys.readouterr()
        with pytest.raises(typer.Exit):
            explain(wrong)
        told = capsys.readouterr().err
        assert told == f"raypo: KEY ({wrong}): there is no such key. {remedy}\n"


def test_config_takes_what_an_override_says_and_a_preset(capsys: pytest.CaptureFixture[str]):
    from raypo.cli.explain import explain

    explain("ppo.kl.coef=0.2")
    assert capsys.readouterr().out.startswith("ppo.kl.coef ")
    explain("dr_grpo")
    told = capsys.readouterr().out
    assert told.startswith(
        "ppo.preset: dr_grpo sets these keys of the section ppo\n  advantage: dr_grpo, "
    )


def test_init_writes_a_run_file_and_keeps_one_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    made, command = tmp_path / "run.yaml", tmp_path / "run.sh"
    command.write_text("python3 -m verl.trainer.main_ppo \\\n  actor_rollout_ref.rollout.n=5\n")
    given = ("init", command, "--to", made)
    assert exit_status(monkeypatch, *given) == 0
    assert "samples_per_prompt: 5 # actor_rollout_ref.rollout.n" in made.read_text()
    todos = made.read_text().partition("# Changes what")[0].count("\n# - ")
    told = f"Set the {todos} TODOs listed at its top; then run, with your GPUs: raypo plan {made} "
    assert told in capsys.readouterr().out
    assert exit_status(monkeypatch, *given) == 2
    assert f"--to ({made}): this file exists already" in capsys.readouterr().err
    to = ("--to", tmp_path / "other.yaml")
    assert exit_status(monkeypatch, "init", "ls -l", *to) == 2
    assert "the command (no known program): only commands of" in capsys.readouterr().err
    assert exit_status(monkeypatch, "init", "nofile.sh", *to) == 2
    assert "nofile.sh: there is no such file." in capsys.readouterr().err
    longer = " ".join(f"data.key_{number}=1" for number in range(30))  # than a file's name
    assert exit_status(monkeypatch, "init", longer, *to) == 0
    assert exit_status(monkeypatch, "init") == 2
