"""Which bundle, node and devices replicas are given, on clusters of several nodes and GPUs."""

from typing import Any

import pytest

from tests.integration.task import on_a_cluster


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return on_a_cluster("placement", str(tmp_path_factory.mktemp("replicas")))


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
    assert "STRICT_PACK" in message
    assert "12 CPU, 12 GPU" in message


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """On nodes of two GPUs; four workers packed, two spread."""
    return on_a_cluster("colocated", str(tmp_path_factory.mktemp("beside")))


def test_colocated_replicas_lie_beside_their_workers_and_see_their_gpus(beside: dict[str, Any]):
    """Engine 0 spans the bundles of workers 0 and 1, engine 1 those of workers 2 and 3."""
    packed = beside["PACK"]
    workers, engines = packed["workers"], packed["engine"]
    assert len({(worker["node"], *worker["gpus"]) for worker in workers}) == 4
    for number, engine in enumerate(engines):
        pair = workers[2 * number : 2 * number + 2]
        assert [worker["node"] for worker in pair] == [engine["node"]] * 2
        assert engine["gpus"] == [gpu for worker in pair for gpu in worker["gpus"]]
    assert engines[0]["node"] != engines[1]["node"]
    assert engines[0]["bundle"] != engines[1]["bundle"]
    assert packed["reference"] == engines  # one on each node, as large as an engine
    assert packed["reward_0"] == [
        {**engine, "gpus": workers[2 * number]["gpus"]} for number, engine in enumerate(engines)
    ]


def test_a_replica_does_not_span_nodes(beside: dict[str, Any]):
    """Two workers, spread over two nodes, would share an engine."""
    message = beside["SPREAD"]
    assert message.startswith(
        "rollout.engine.tensor_parallel (2): learner workers 0 to 1 would share"
    )
    assert "are on 2 nodes. Set placement.strategy to PACK" in message
