"""The files in examples/cluster are what their programs read; `submit.sh` is run by a slow test."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from raypo.config import PPOConfig
from raypo.plan.fit import make_plan
from raypo.plan.hardware import parse_cluster

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"


@pytest.mark.parametrize("name", ["slurm.sh", "submit.sh"])
def test_scripts_are_bash(name: str):
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n", str(FOLDER / name)], check=True)
    text = (FOLDER / name).read_text()
    assert "raypo" in text


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    scripts = [*FOLDER.glob("*.sh"), *(FOLDER.parents[1] / "scripts").glob("*.sh")]
    done = subprocess.run(
        ["shellcheck", *map(str, scripts)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_slurm_script_starts_one_head_and_workers_that_join_it():
    text = (FOLDER / "slurm.sh").read_text()
    assert "#SBATCH --nodes" in text
    assert "ray start --head" in text
    assert "--address=" in text


def test_the_manifest_is_a_ray_job_that_trains():
    manifest = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
    assert manifest["kind"] == "RayJob"
    assert manifest["apiVersion"].startswith("ray.io/")
    assert "raypo train" in manifest["spec"]["entrypoint"]
    cluster = manifest["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        containers = group["template"]["spec"]["containers"]
        assert all(container["image"] for container in containers)
    assert all(group["replicas"] >= 1 for group in cluster["workerGroupSpecs"])


STAND_INS = {
    "scontrol": "echo here",
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "hostname": "echo 127.0.0.1",
    "sleep": "exit 0",
    "raypo": 'echo "raypo $*, address $RAY_ADDRESS"',
    "python": 'echo "1 of 2 nodes have joined" >&2; exit ${MISSING:-0}',
    "ray": 'case "$1" in get-auth-token) echo generated; exit;; status) exit;; esac\n'
    'echo "ray $1 ${2%%=*}: $RAY_AUTH_MODE $RAY_AUTH_TOKEN"',
}
"""Of the programs that the scripts start: each says what it was told."""


def run_script(folder: Path, name: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    for program, text in STAND_INS.items():
        (programs / program).write_text(f"#!/bin/bash\n{text}\n")
        (programs / program).chmod(0o755)
    return subprocess.run(
        [str(FOLDER / name), "ppo.yaml"],
        cwd=folder,
        env={"HOME": str(folder), "PATH": f"{programs}:{os.environ['PATH']}", **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


SLURM = {"SLURM_JOB_NODELIST": "here", "SLURM_JOB_NUM_NODES": "2", "RAYPO_WAIT_S": "0"}


def test_all_nodes_of_a_slurm_job_and_the_run_have_one_token(tmp_path: Path):
    done = run_script(tmp_path, "slurm.sh", SLURM)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "ray start --block: token generated",
        "ray start --head: token generated",
        "raypo train ppo.yaml, address 127.0.0.1:6379",
    ]


def test_a_token_or_mode_of_the_users_reaches_the_nodes_of_a_slurm_job(tmp_path: Path):
    done = run_script(tmp_path / "token", "slurm.sh", SLURM | {"RAY_AUTH_TOKEN": "mine"})
    assert "ray start --head: token mine" in done.stdout
    done = run_script(tmp_path / "mode", "slurm.sh", SLURM | {"RAY_AUTH_MODE": "disabled"})
    assert "ray start --head: disabled \n" in done.stdout


def test_nodes_that_do_not_join_a_slurm_job_end_it_with_what_was_said_last(tmp_path: Path):
    done = run_script(tmp_path, "slurm.sh", SLURM | {"MISSING": "1"})
    assert done.returncode == 1
    assert done.stderr == (
        "The Ray cluster is not complete. The last look at it said:\n1 of 2 nodes have joined\n"
    )
    assert "raypo train" not in done.stdout


def test_a_submitted_run_brings_the_token_that_is_there(tmp_path: Path):
    without = run_script(tmp_path / "without", "submit.sh", {})
    assert without.stdout == "ray job submit:  \n"
    given = run_script(tmp_path / "given", "submit.sh", {"RAY_AUTH_TOKEN": "mine"})
    assert given.stdout == "ray job submit: token mine\n"
    token = tmp_path / "kept" / ".ray" / "auth_token"
    token.parent.mkdir(parents=True)
    token.write_text("kept")
    assert run_script(tmp_path / "kept", "submit.sh", {}).stdout == "ray job submit: token \n"


QWEN_7B = {
    "model_type": "qwen2",
    "vocab_size": 152_064,
    "hidden_size": 3_584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


def test_the_nodes_of_the_manifest_hold_what_the_plan_asks_for_seven_billion_weights(
    tmp_path: Path,
):
    """PPO with critic and reference; Kubernetes kills a container above its limit."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    spec = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())["spec"]
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus, memory = int(limits["nvidia.com/gpu"]), int(limits["memory"].removesuffix("Gi"))
    assert f"learner.num_workers={group['replicas'] * gpus}" in spec["entrypoint"]
    run = PPOConfig.parse(
        {
            "name": "run",
            "model": {"policy": str(tmp_path)},
            "data": {"prompts": "prompts.jsonl", "max_prompt_tokens": 1024},
            "rollout": {"prompts_per_step": 256, "samples_per_prompt": 4, "max_new_tokens": 1024},
            "ppo": {"minibatch_size": 256},
            "learner": {"num_workers": group["replicas"] * gpus, "zero_stage": 3},
        }
    )
    cluster = f"{gpus}xGPU80G,{limits['cpu']}xCPU,{memory * 2**30 / 1e9:g}G,{group['replicas']}"
    plan = make_plan(run, parse_cluster(cluster))
    assert plan.fits, plan.problems
