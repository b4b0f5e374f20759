"""The files in examples/cluster are what their programs read; `submit.sh` is run by a slow test."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"


@pytest.mark.parametrize("name", ["slurm.sh", "submit.sh"])
def test_scripts_are_bash(name: str):
    bash = shutil.which("bash")
    assert bash is not None
    subprocess.run([bash, "-n", str(FOLDER / name)], check=True)
    text = (FOLDER / name).read_text()
    assert "raypo" in text


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
