"""Runs on a cluster of two nodes, which share no object store: submitted, and as a Slurm job."""

import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.ray_cluster import (
    Host,
    StartedCluster,
    environment_of,
    free_port,
    short_folder,
    started_cluster,
)
from tests.integration.task import REPOSITORY, read_metrics, write_task

OVERRIDES = (
    "num_steps=1",
    "learner.num_workers=2",
    "placement.strategy=STRICT_SPREAD",
    "rollout.engine.count=2",
    "rollout.engine.kv_cache_gb=0.1",
    "ppo.advantage=reinforce",
    "ppo.kl.coef=0",
    "eval.prompts=null",
)
"""One worker and one engine on each node: the weights of worker 0 must reach both."""
ACTORS = """
import json, sys
from ray.util.state import list_actors
actors = list_actors(address=sys.argv[1], limit=1000, detail=True)
print(json.dumps([[a.name, a.node_id, a.ray_namespace] for a in actors if "engine" in a.name]))
"""


def submit(cluster: StartedCluster, config: Path, *, prefix: tuple[str, ...] = ()) -> None:
    """A run by the script that users start; its output is shown when it fails."""
    done = subprocess.run(
        [*prefix, str(REPOSITORY / "examples/cluster/submit.sh"), str(config), *OVERRIDES],
        env={**cluster.env, "RAY_API_SERVER_ADDRESS": cluster.dashboard},
        cwd=config.parent,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def nodes_of_engines(cluster: StartedCluster, *, prefix: tuple[str, ...] = ()) -> set[str]:
    listed = subprocess.run(
        [*prefix, "python", "-c", ACTORS, cluster.dashboard],
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    actors = json.loads(listed.stdout.strip().splitlines()[-1])
    replicas = [entry for entry in actors if entry[0].split(":")[-1].isdigit()]
    assert {name for name, _, _ in replicas} == {"raypo:tiny:engine:0", "raypo:tiny:engine:1"}
    assert {namespace for _, _, namespace in replicas} == {"raypo"}
    return {node for _, node, _ in replicas}


def assert_weights_arrived(folder: Path) -> None:
    """Learner and both engines agreed after the push of the update, on every probed token."""
    (row,) = read_metrics(folder / "runs" / "tiny")
    assert row["mismatch/probe_gap_max"] < 1e-3
    assert row["ppo/skipped_updates"] == 0


@pytest.mark.filterwarnings("ignore")
def test_a_submitted_run_brings_its_weights_to_an_engine_on_another_node(tmp_path: Path):
    config = write_task(tmp_path / "task")
    with started_cluster([Host(), Host("127.0.0.2")]) as cluster:
        submit(cluster, config)
        assert len(nodes_of_engines(cluster)) == 2
    assert_weights_arrived(tmp_path / "task")


SLURM = {
    "scontrol": 'printf "127.0.0.1\\n127.0.0.2\\n"',
    "srun": "host=127.0.0.2\n"
    "while [[ $1 == --* ]]; do [[ $1 == --nodelist=* ]] && host=${1#*=}; shift; done\n"
    'exec "$@" --node-ip-address="$host" --dashboard-agent-listen-port=$((52400 + ${host##*.})) '
    "--num-cpus=1 --object-store-memory=200000000",
}
"""Slurm's own programs, for two nodes on one machine; all else that the script starts is real."""


@pytest.mark.filterwarnings("ignore")
def test_a_slurm_job_trains_on_both_of_its_nodes(tmp_path: Path):
    config = write_task(tmp_path / "task")
    programs = config.parent / ".venv/bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    for name, text in SLURM.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    with short_folder() as folder, (tmp_path / "log").open("w+") as log:
        job = subprocess.Popen(
            [str(REPOSITORY / "examples/cluster/slurm.sh"), str(config), *OVERRIDES],
            env=environment_of(Host())
            | {"SLURM_JOB_NODELIST": "two", "SLURM_JOB_NUM_NODES": "2", "RAYPO_WAIT_S": "120"}
            | {"RAYPO_HEAD_ADDRESS": "127.0.0.1"}
            | {"RAY_PORT": str(free_port()), "RAY_TMPDIR": folder, "HOME": folder},
            cwd=config.parent,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = None
        try:
            with suppress(subprocess.TimeoutExpired):
                status = job.wait(500)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGTERM)  # as Slurm ends what a job has left
        log.seek(0)
        assert status == 0, log.read()[-5000:]
    assert_weights_arrived(tmp_path / "task")
