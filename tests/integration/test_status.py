"""`raypo status` of runs whose folders are out of reach: it asks their monitors on the cluster."""

import subprocess
import sys
from pathlib import Path

import ray

from raypo.cluster.run_monitor import start_monitor


def test_runs_under_way_on_a_cluster_are_told_beside_those_on_disk(local_ray: None, tmp_path: Path):
    about = {"recipe": "ppo", "location": "s3://nowhere/runs/far", "num_steps": 40}
    monitor = start_monitor("far", about=about)
    ray.get(monitor.tell.remote("step", {"step": 12, "rollout/score_mean": 0.5}))
    address = ray.get_runtime_context().gcs_address

    def status() -> str:
        command = [sys.executable, "-m", "raypo.cli", "status", "--cluster", address]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = status()
    assert "far: ppo, running, step 12 of 40" in told
    assert "s3://nowhere/runs/far" in told

    ray.kill(monitor)
    assert f"no run is active on {address}" in status()
