"""Which bundle, node and devices replicas are given, on a cluster of four nodes and 12 GPUs."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.integration.task import REPOSITORY


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("replicas")
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.on_a_cluster", "placement", str(folder)],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}


def test_each_replica_lies_in_its_bundle_and_sees_that_bundles_gpus(found: dict[str, Any]):
    """Two engines of two GPUs each; reference and reward model share a third bundle's GPU."""
    assert found["bundles"] == [
        "1 CPU, 2 GPU for engine:0",
        "1 CPU, 2 GPU for engine:1",
        "1 CPU, 1 GPU for reference:0, reward_0:0",
    ]
    replicas = found["replicas"]
    assert [bundle for bundle, _, _ in replicas["engine"]] == [0, 1]
    assert [bundle for bundle, _, _ in replicas["reference"] + replicas["reward_0"]] == [2, 2]
    everyone = [each for role in replicas.values() for each in role]
    assert all(is_on_its_node for _, is_on_its_node, _ in everyone)
    gpus = {role: [devices.split(",") for *_, devices in each] for role, each in replicas.items()}
    assert [len(devices) for devices in gpus["engine"]] == [2, 2]
    assert [len(devices) for devices in gpus["reference"]] == [1]
    assert gpus["reference"] == gpus["reward_0"]


def test_bundles_lie_as_the_strategy_says(found: dict[str, Any]):
    assert found["SPREAD"] == [0, 1, 2]
    assert found["STRICT_SPREAD"] == [0, 1, 2]
    assert len(set(found["PACK"])) == 2  # 5 GPUs on nodes of 4


def test_what_is_not_free_in_time_names_the_bundle_that_waits(found: dict[str, Any]):
    message = found["STRICT_PACK"]
    assert message.startswith("placement.timeout_s (5): bundle ")
    assert "placement.strategy STRICT_PACK, free are 12 CPU, 12 GPU" in message
