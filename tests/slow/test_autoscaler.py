"""Runs that ask for more than the cluster has: Ray's autoscaler adds the nodes that they name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.ray_cluster import Host, StartedCluster, started_cluster
from tests.integration.task import REPOSITORY, read_metrics, write_task

ACTORS = """
import json, sys
from ray.util.state import list_actors, list_nodes
labels = {n.node_id: n.labels or {} for n in list_nodes(address=sys.argv[1], detail=True)}
actors = list_actors(address=sys.argv[1], limit=1000, detail=True)
print(json.dumps([[a.class_name, a.name, labels[a.node_id].get("tier")] for a in actors]))
"""


def train(cluster: StartedCluster, config: Path, *overrides: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "raypo.cli", "train", str(config), *overrides,
         f"cluster.address={cluster.address}", "num_steps=1", "ppo.advantage=reinforce",
         "ppo.kl.coef=0", "eval.prompts=null", "rollout.engine.kv_cache_gb=0.1"],
        env=cluster.env,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    return done.stdout


def tiers(cluster: StartedCluster) -> dict[str, Any]:
    """The label `tier` of the nodes on which learner workers and engines lay."""
    listed = subprocess.run(
        [sys.executable, "-c", ACTORS, cluster.dashboard],
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(listed.stdout.strip().splitlines()[-1])
    workers = {tier for kind, _, tier in found if kind.endswith("RayTrainWorker")}
    engines = {tier for _, name, tier in found if name and ":engine:" in name}
    return {"learner": workers, "engine": engines}


def node_type(**labels: str) -> dict[str, Any]:
    return {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 2, "labels": labels}


@pytest.mark.filterwarnings("ignore")
def test_each_role_waits_for_a_node_with_its_labels(tmp_path: Path):
    """The head has room for one of them, and no label."""
    config = write_task(tmp_path / "task")
    types = {"silver": node_type(tier="silver"), "gold": node_type(tier="gold")}
    with started_cluster([Host()], autoscaler=types) as cluster:
        said = train(
            cluster,
            config,
            "placement.mode={engine: dedicated}",
            'placement.label_selector={learner: {tier: silver}, engine: {tier: "in(gold, brass)"}}',
        )
        assert tiers(cluster) == {"learner": {"silver"}, "engine": {"gold"}}
    assert "The nodes that the cluster has now (1) have no room for this run. The run waits" in said
    assert len(read_metrics(tmp_path / "task" / "runs" / "tiny")) == 1


@pytest.mark.filterwarnings("ignore")
def test_the_autoscaler_of_older_clusters_adds_nodes_too(tmp_path: Path):
    config = write_task(tmp_path / "task")
    with started_cluster([Host()], autoscaler={"plain": node_type()}, version="v1") as cluster:
        said = train(cluster, config, "placement.mode={engine: dedicated}")
    assert "(1) have no room for this run. The run waits" in said
    assert len(read_metrics(tmp_path / "task" / "runs" / "tiny")) == 1
