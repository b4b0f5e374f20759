"""The files in examples/cluster are what their programs read; `submit.sh` is run by a slow test."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError, validate

from raypo.cluster.hardware import parse_cluster
from raypo.config import PPOConfig
from raypo.plan.fit import make_plan
from scripts.scale_table import QWEN, SIZES

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"


@pytest.mark.parametrize("name", ["slurm.sh", "submit.sh"])
def test_scripts_are_bash(name: str):
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n", str(FOLDER / name)], check=True)
    text = (FOLDER / name).read_text()
    assert "raypo" in text


def test_shellcheck_finds_nothing():
    scripts = [*FOLDER.glob("*.sh"), *(FOLDER.parents[1] / "scripts").glob("*.sh")]
    done = subprocess.run(
        ["shellcheck", *map(str, scripts)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_the_slurm_script_starts_one_head_and_workers_that_join_it():
    text = (FOLDER / "slurm.sh").read_text()
    assert "#SBATCH --nodes" in text
    assert "#SBATCH --mem=0\n" in text, "all of a node's: --exclusive gives no memory"
    assert "ray start --head" in text
    assert "--address=" in text


def fields(required: str, **properties: Any) -> dict[str, Any]:
    """An object of these fields and no others; `required` names those that must be there."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


TEXT: Any = {"type": "string", "minLength": 1}
COUNT: Any = {"type": "integer", "minimum": 0}
TEXTS: Any = {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITY: Any = {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[kMGTP]|[KMGTP]i)?$"}
QUANTITIES: Any = {"type": "object", "additionalProperties": QUANTITY}
VOLUME = fields(
    "name",
    name=TEXT,
    persistentVolumeClaim=fields("claimName", claimName=TEXT, readOnly={"type": "boolean"}),
    emptyDir=fields("", medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
)
CONTAINER = fields(
    "name image",
    name=TEXT,
    image=TEXT,
    resources=fields("", limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts={"type": "array", "items": fields("name mountPath", name=TEXT, mountPath=TEXT)},
)
CONTAINERS: Any = {"type": "array", "items": CONTAINER, "minItems": 1}
VOLUMES: Any = {"type": "array", "items": VOLUME}
TEMPLATE = fields("spec", spec=fields("containers", containers=CONTAINERS, volumes=VOLUMES))
HEAD = fields("template", rayStartParams=TEXTS, template=TEMPLATE)
WORKERS = fields(
    "groupName minReplicas maxReplicas rayStartParams template",
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=TEMPLATE,
)
GROUPS: Any = {"type": "array", "items": WORKERS}
RAY_JOB = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=fields(
        "name", name={"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,46}[a-z0-9])?$"}
    ),
    spec=fields(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        shutdownAfterJobFinishes={"type": "boolean"},
        ttlSecondsAfterFinished=COUNT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
        rayClusterSpec=fields("headGroupSpec", headGroupSpec=HEAD, workerGroupSpecs=GROUPS),
    ),
)
"""What KubeRay's RayJob and Kubernetes' pods say of the fields that we use: a misspelt one, a
number in a text's place or a missing one is refused, as a cluster would."""


def manifest() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "rayjob.yaml").read_text())


def test_the_manifest_is_a_ray_job_that_trains():
    validate(manifest(), RAY_JOB)
    spec = manifest()["spec"]
    assert spec["entrypoint"].startswith("raypo train")
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]
    for each in (spec["rayClusterSpec"]["headGroupSpec"], group):
        pod = each["template"]["spec"]
        known = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= known
            resources = container["resources"]
            assert resources["limits"] == resources["requests"]  # GPUs cannot differ


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ttlSecondsAfterFinished", "3600"),
        ("submissionMode", "K8SJobMode"),
        ("shutdownAfterFinish", True),
        ("entrypoint", None),
    ],
)
def test_a_manifest_that_a_cluster_would_refuse_is_refused(key: str, value: object):
    wrong = manifest()
    wrong["spec"][key] = value
    with pytest.raises(ValidationError):
        validate(wrong, RAY_JOB)
    wrong = manifest()
    wrong["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"] = {"num-cpus": 0}
    with pytest.raises(ValidationError):
        validate(wrong, RAY_JOB)


STAND_INS = {
    "scontrol": "echo here",
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "hostname": '[ "$1" = --ip-address ] && echo 127.0.1.1 || echo fe80::1 10.0.0.7 10.1.0.7',
    "sleep": "exit 0",
    "raypo": 'echo "raypo $*, address $RAY_ADDRESS"',
    "python": 'echo "1 of 2 nodes have joined" >&2; exit ${MISSING:-0}',
    "ray": 'case "$1" in get-auth-token) echo generated; exit;; status) exit;; esac\n'
    "cpus=${SRUN_CPUS_PER_TASK:+, $SRUN_CPUS_PER_TASK CPUs}\n"
    'echo "ray $1 ${2%%=*}: $RAY_AUTH_MODE $RAY_AUTH_TOKEN$cpus"',
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
SLURM |= {"SLURM_CPUS_PER_TASK": "32"}


def test_all_nodes_of_a_slurm_job_have_one_token_their_cores_and_an_address_that_all_reach(
    tmp_path: Path,
):
    done = run_script(tmp_path, "slurm.sh", SLURM)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "ray start --block: token generated, 32 CPUs",
        "ray start --head: token generated, 32 CPUs",
        "raypo train ppo.yaml, address 10.0.0.7:6379",
    ]


def test_a_token_or_mode_of_the_users_reaches_the_nodes_of_a_slurm_job(tmp_path: Path):
    done = run_script(tmp_path / "token", "slurm.sh", SLURM | {"RAY_AUTH_TOKEN": "mine"})
    assert "ray start --head: token mine, 32 CPUs" in done.stdout
    done = run_script(tmp_path / "mode", "slurm.sh", SLURM | {"RAY_AUTH_MODE": "disabled"})
    assert "ray start --head: disabled , 32 CPUs\n" in done.stdout


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


def test_the_nodes_of_the_manifest_hold_what_the_plan_asks_for_seven_billion_weights(
    tmp_path: Path,
):
    """PPO with critic and reference; Kubernetes kills a container above its limit."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN | SIZES["7B"]))
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
