"""Who shares which bundle of the dedicated group, and where it comes to lie."""

from typing import Any

import pytest

from raypo.config import ConfigError, PPOConfig
from raypo.plan.dedicated import dedicated_bundles
from raypo.plan.hardware import parse_cluster
from raypo.plan.layout import left_of, place_bundles


def config(mode: Any = "dedicated", *, engines: int = 1, **placement: Any) -> PPOConfig:
    return PPOConfig.parse(
        {
            "name": "run",
            "model": {"policy": "p", "reward": ["a", "b"]},
            "data": {"prompts": "d.jsonl"},
            "rollout": {"engine": {"count": engines}},
            "placement": {"mode": mode, **placement},
        }
    )


def layout(run: PPOConfig, *, use_gpu: bool = True) -> list[str]:
    return [str(bundle) for bundle in dedicated_bundles(run, use_gpu=use_gpu)]


def test_frozen_models_share_a_gpu_as_long_as_their_parts_fit():
    assert layout(config(engines=2)) == [
        "1 CPU, 1 GPU for engine:0",
        "1 CPU, 1 GPU for engine:1",
        "1 CPU, 1 GPU for reference:0, reward_0:0",
        "1 CPU, 1 GPU for reward_1:0",
    ]


def test_an_engine_shares_its_gpu_where_it_leaves_room():
    shares = {"engine": 0.5, "reference": 0.25, "reward": 0.125}
    assert layout(config(gpus=shares)) == [
        "1 CPU, 1 GPU for engine:0, reference:0, reward_0:0, reward_1:0"
    ]
    assert (
        layout(config(gpus={"engine": 0.5}, engines=2))[0] == "1 CPU, 1 GPU for engine:0, engine:1"
    )


def test_on_cpu_each_engine_has_its_cores_and_frozen_models_take_turns_with_the_first():
    assert layout(config(engines=2, cpus_per_bundle=4), use_gpu=False) == [
        "4 CPU for engine:0, reference:0, reward_0:0, reward_1:0",
        "4 CPU for engine:1",
    ]


def test_the_map_places_each_role_by_itself():
    assert layout(config({"reference": "dedicated"})) == ["1 CPU, 1 GPU for reference:0"]
    assert layout(config({"engine": "dedicated"})) == ["1 CPU, 1 GPU for engine:0"]
    assert layout(config("colocated")) == []


def test_a_tensor_parallel_engine_is_one_bundle_of_whole_gpus():
    run = PPOConfig.parse(
        {
            "name": "run",
            "model": {"policy": "p"},
            "data": {"prompts": "d.jsonl"},
            "rollout": {"engine": {"count": 2, "tensor_parallel": 4}},
            "placement": {"mode": {"engine": "dedicated"}},
        }
    )
    assert layout(run) == ["1 CPU, 4 GPU for engine:0", "1 CPU, 4 GPU for engine:1"]


@pytest.mark.parametrize(
    ("strategy", "cluster", "nodes"),
    [
        ("PACK", "4xGPU80G,2", [0, 0, 0, 0]),
        ("PACK", "3xGPU80G,2", [0, 0, 0, 1]),
        ("SPREAD", "4xGPU80G,2", [0, 1, 0, 1]),
        ("STRICT_SPREAD", "1xGPU80G,4", [0, 1, 2, 3]),
        ("STRICT_PACK", "2xGPU80G+4xGPU80G", [1, 1, 1, 1]),
    ],
)
def test_bundles_lie_as_the_strategy_says(strategy: str, cluster: str, nodes: list[int]):
    bundles = dedicated_bundles(config(engines=2), use_gpu=True)
    there = parse_cluster(cluster)
    placed = place_bundles(there, bundles, strategy=strategy)
    assert placed == nodes
    taken = [placed.count(index) for index in range(len(there))]
    left = left_of(there, bundles, placed)
    assert [node.gpus for node in left] == [n.gpus - t for n, t in zip(there, taken, strict=True)]


@pytest.mark.parametrize(
    ("strategy", "cluster"),
    [("PACK", "3xGPU80G"), ("STRICT_SPREAD", "8xGPU80G,3"), ("STRICT_PACK", "2xGPU80G,2")],
)
def test_what_does_not_fit_is_refused_with_who_asks(strategy: str, cluster: str):
    bundles = dedicated_bundles(config(engines=2), use_gpu=True)
    with pytest.raises(ConfigError, match=rf"1 CPU, 1 GPU for .* placement.strategy {strategy}"):
        place_bundles(parse_cluster(cluster), bundles, strategy=strategy)


def test_the_recipes_without_frozen_models_refuse_the_mode():
    from raypo.config import SFTConfig

    values = {
        "name": "s",
        "recipe": "sft",
        "model": {"policy": "p"},
        "data": {"prompts": "d.jsonl", "response_key": "r"},
        "placement": {"mode": "dedicated"},
    }
    with pytest.raises(ConfigError, match="the recipe sft has nothing that could live in a group"):
        SFTConfig.parse(values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": {"tensor_parallel": 2}, "use_gpu": True}, "must divide learner.num_workers"),
        ({"engine": {"count": 2}, "use_gpu": True}, "to at most 1, or placement.mode to dedicated"),
    ],
)
def test_engines_that_cannot_be_are_refused(changes: dict, message: str):
    values = {
        "name": "run",
        "model": {"policy": "p"},
        "data": {"prompts": "d.jsonl"},
        "rollout": {"engine": changes["engine"]},
        "learner": {"use_gpu": changes["use_gpu"]},
    }
    with pytest.raises(ConfigError, match=message):
        PPOConfig.parse(values)


def test_a_frozen_model_in_vllm_may_span_the_gpus_of_a_bundle():
    frozen = {"reference": {"backend": "vllm", "tensor_parallel": 4}}
    run = config({"reference": "dedicated"}, frozen=frozen, gpus={"reference": 1.0})
    assert layout(run) == ["1 CPU, 4 GPU for reference:0"]
    assert layout(run, use_gpu=False) == ["1 CPU for reference:0"]


@pytest.mark.parametrize(
    ("mode", "placement", "message"),
    [
        (
            "dedicated",
            {"frozen": {"reward": {"tensor_parallel": 2}}},
            r"tensor_parallel \(2\): backend torch computes on one",
        ),
        (
            "colocated",
            {"frozen": {"reward": {"backend": "vllm", "tensor_parallel": 2}}},
            r"reward\.tensor_parallel \(2\): .* of 2 learner workers, and there are 1 .* or "
            r"placement\.mode to dedicated",
        ),
        (
            "dedicated",
            {"frozen": {"reference": {"backend": "vllm", "tensor_parallel": 2}}},
            r"placement\.gpus\.reference \(0\.5\): .* takes whole ones\. Set it to 1",
        ),
    ],
)
def test_frozen_models_that_cannot_span_devices_are_refused(
    mode: str, placement: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        config(mode, **placement)


def test_vllm_gives_log_probs_of_prompts_at_temperature_1_alone():
    values = {
        "name": "run",
        "model": {"policy": "p"},
        "data": {"prompts": "d.jsonl"},
        "rollout": {"temperature": 0.7},
        "placement": {"frozen": {"reference": {"backend": "vllm"}}},
    }
    with pytest.raises(ConfigError, match=r"temperature is 0\.7\. Set it to torch"):
        PPOConfig.parse(values)
    PPOConfig.parse(values | {"rollout": {}})
