"""Who shares which bundle, where bundles come to lie, and what can never fit; no Ray is started."""

from dataclasses import replace
from typing import Any, Literal

import pytest

from raypo.cluster.hardware import parse_cluster
from raypo.cluster.placement import (
    NODE_ID_LABEL,
    Bundle,
    LabelledResources,
    PlacementError,
    Resources,
    ServedRole,
    count_group_copies,
    dedicated_bundles,
    first_workers,
    lay_out,
    matches,
    place,
    remaining_resources,
)
from raypo.config import ConfigError, FrozenSection, PPOConfig


def config(
    mode: Any = "dedicated",
    *,
    engines: int = 1,
    gpu_memory_fraction: float = 0.5,
    **placement: Any,
) -> PPOConfig:
    return PPOConfig.parse(
        {
            "name": "run",
            "model": {"policy": "p", "reward": ["a", "b"]},
            "data": {"prompts": "d.jsonl"},
            "rollout": {"engine": {"count": engines, "gpu_memory_fraction": gpu_memory_fraction}},
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


def test_a_deployed_judge_is_placed_like_other_frozen_models():
    values = config("colocated").model_dump()
    values["reward"]["judge"] = {"path": "j", "template": "{response}"}
    values["placement"] |= {"mode": {"judge": "dedicated"}, "gpus": {"judge": 1.0}}
    values["placement"]["frozen"]["judge"] = {"tensor_parallel": 2, "num_replicas": 2}
    apart = PPOConfig.parse(values)
    assert layout(apart) == ["1 CPU, 2 GPU for judge:0", "1 CPU, 2 GPU for judge:1"]
    beside = PPOConfig.parse(values | {"placement": {}})
    nodes = parse_cluster("1xGPU80G,8xCPU,100G")
    (placed,) = lay_out(beside, [each.resources for each in nodes], use_gpu=True)
    assert placed.roles[-1] == "judge:0"


def test_an_engine_shares_its_gpu_where_it_leaves_room():
    shares = {"engine": 0.5, "reference": 0.25, "reward": 0.125}
    assert layout(config(gpus=shares)) == [
        "1 CPU, 1 GPU for engine:0, reference:0, reward_0:0, reward_1:0"
    ]
    halves = config(gpus={"engine": 0.5}, engines=2, gpu_memory_fraction=0.45)
    assert layout(halves)[0] == "1 CPU, 1 GPU for engine:0, engine:1"


def test_engines_of_one_gpu_leave_room_for_what_cuda_takes():
    refused = r"gpu_memory_fraction \(0\.5\): engines share a GPU .* below 0\.5, like 0\.45\."
    with pytest.raises(ConfigError, match=refused):
        config(gpus={"engine": 0.5}, engines=2)
    config(gpus={"engine": 0.5}, engines=1)


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


def workers(**changes: Any) -> PPOConfig:
    """A run whose engines and frozen models lie beside its learner workers."""
    values = {
        "name": "run",
        "model": {"policy": "p"},
        "data": {"prompts": "d.jsonl"},
        "ppo": {"kl": {"coef": 0.0}},
    }
    return PPOConfig.parse(values | changes)


def nodes_of(cluster: str) -> list[Resources]:
    return [node.resources for node in parse_cluster(cluster)]


def bundles(count: int, **resources: float) -> list[Bundle]:
    return [Bundle(resources, ())] * count


def placed(
    count: int, nodes: list[Resources], strategy: str = "PACK", **resources: float
) -> list[int]:
    found = place(bundles(count, **resources), nodes, strategy)
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize(
    ("strategy", "cluster", "nodes"),
    [
        ("PACK", "4xGPU80G,2", [0, 0, 0, 0]),
        ("PACK", "3xGPU80G,2", [0, 0, 0, 1]),
        ("PACK", "3xGPU80G+4xGPU80G", [1, 1, 1, 1]),
        ("SPREAD", "4xGPU80G,2", [0, 1, 0, 1]),
        ("STRICT_SPREAD", "1xGPU80G,4", [0, 1, 2, 3]),
        ("STRICT_PACK", "2xGPU80G+4xGPU80G", [1, 1, 1, 1]),
    ],
)
def test_bundles_lie_as_the_strategy_says(strategy: str, cluster: str, nodes: list[int]):
    made, there = dedicated_bundles(config(engines=2), use_gpu=True), nodes_of(cluster)
    found = place(made, there, strategy)
    assert [found[index] for index in range(len(made))] == nodes
    left = [node["GPU"] for node in remaining_resources(there, made, found)]
    assert left == [node["GPU"] - nodes.count(index) for index, node in enumerate(there)]


def test_large_bundles_come_first_as_ray_sorts_them():
    """Else the small one would lie on the node that the large one needs."""
    small, large = Bundle({"GPU": 1.0}, ()), Bundle({"GPU": 4.0}, ())
    assert place([small, large], [{"GPU": 4.0}, {"GPU": 1.0}], "PACK") == {0: 1, 1: 0}


def test_a_bundle_lies_on_one_node():
    assert placed(2, [{"CPU": 4.0}, {"CPU": 2.0}], CPU=3) == [0], "6 in all, but not 4 and 2"
    assert placed(2, [{"CPU": 4.0}, {"CPU": 2.0}], "SPREAD", CPU=2) == [0, 1]
    assert placed(2, [{"CPU": 4.0}, {"CPU": 4.0}], "STRICT_PACK", CPU=3) == [0]
    assert placed(2, [{"CPU": 8.0}], "STRICT_SPREAD", CPU=3) == [0]
    assert placed(1, [{"CPU": 2.0}], GPU=1) == [], "nobody has any"
    assert placed(1, []) == placed(1, [], "STRICT_PACK", CPU=1) == []


@pytest.mark.parametrize(
    ("strategy", "count", "expected"),
    [
        ("PACK", 5, [0, 0, 0, 0, 1]),
        ("SPREAD", 5, [0, 0, 0, 1, 1]),
        ("STRICT_PACK", 4, [0, 0, 0, 0]),
        ("STRICT_SPREAD", 2, [0, 1]),
    ],
)
def test_workers_are_sorted_by_node(strategy: str, count: int, expected: list[int]):
    run = workers(learner={"num_workers": count}, placement={"strategy": strategy})
    made = lay_out(run, nodes_of("4xGPU80G,2"), use_gpu=True)
    assert [each.node for each in made] == expected
    assert [str(each.gpus[0]) for each in made if each.node == 0] == list("0123")[
        : expected.count(0)
    ]


@pytest.mark.parametrize(
    ("strategy", "count", "room", "remedy"),
    [
        ("PACK", 9, 8, "Set learner.num_workers to at most 8"),
        ("STRICT_PACK", 5, 4, "Set placement.strategy to PACK"),
        ("STRICT_SPREAD", 3, 2, "Set placement.strategy to SPREAD"),
    ],
)
def test_what_has_no_room_says_what_to_change(strategy: str, count: int, room: int, remedy: str):
    run = workers(learner={"num_workers": count}, placement={"strategy": strategy})
    with pytest.raises(PlacementError) as caught:
        lay_out(run, nodes_of("4xGPU80G,2"), use_gpu=True)
    assert str(caught.value) == (
        f"learner.num_workers ({count}): asks for {count} bundles of 1 CPU, 1 GPU, each on one "
        f"node; the cluster has 8 GPU on 2 nodes, and the largest node has 4 GPU: "
        f"under placement.strategy {strategy} there is room for {room}. {remedy}, or use a larger "
        "cluster."
    )


@pytest.mark.parametrize(
    ("each", "nodes", "remedy"),
    [
        ({"CPU": 8.0}, [{"CPU": 4.0}] * 2, r"Lower learner.cpus_per_worker \(8\)"),
        ({"CPU": 1.0, "GPU": 1.0}, [{"CPU": 2.0}], "Set learner.use_gpu to false"),
        ({"CPU": 1.0, "TPU": 1.0}, [{"CPU": 2.0}], "Lower TPU in ScalingConfig.resources_per_w"),
    ],
)
def test_a_worker_that_no_node_can_hold_names_what_is_short(
    each: Resources, nodes: list[Resources], remedy: str
):
    with pytest.raises(PlacementError, match=rf"there is room for 0. {remedy}"):
        lay_out(workers(), nodes, use_gpu="GPU" in each, resources_per_worker=each)


def test_groups_that_fit_alone_but_not_together_are_refused():
    run = workers(
        placement={"mode": {"engine": "dedicated"}},
        learner={"num_workers": 2},
        rollout={"engine": {"count": 1}},
    )
    with pytest.raises(PlacementError) as caught:
        lay_out(run, [{"CPU": 8.0, "GPU": 2.0}], use_gpu=True)
    assert str(caught.value) == (
        "placement.mode: the dedicated group (1 CPU, 1 GPU for engine:0) and the learner workers "
        "(2 bundles of 1 CPU, 1 GPU) do not fit the cluster at the same time under "
        "placement.strategy PACK. It has 8 CPU, 2 GPU on 1 node, and its largest node 8 CPU, 2 "
        "GPU. Set learner.num_workers to at most 1, lower rollout.engine.count, placement.gpus or "
        "placement.cpus_per_bundle, or set placement.mode to colocated."
    )
    made = lay_out(run, [{"CPU": 8.0, "GPU": 3.0}], use_gpu=True)
    assert [(each.group, each.devices) for each in made] == [
        ("dedicated", "GPU 0"),
        ("workers", "GPU 1"),
        ("workers", "GPU 2"),
    ]


def test_a_dedicated_group_that_takes_every_gpu_is_no_reason_to_train_without_any():
    run = workers(
        placement={"mode": {"engine": "dedicated"}},
        learner={"num_workers": 8, "cpus_per_worker": 2},
        rollout={"engine": {"count": 8}},
    )
    with pytest.raises(PlacementError) as caught:
        lay_out(run, [{"CPU": 64.0, "GPU": 8.0}], use_gpu=True)
    assert str(caught.value).endswith(
        "Use a larger cluster, lower rollout.engine.count, placement.gpus or "
        "placement.cpus_per_bundle, or set placement.mode to colocated."
    )


@pytest.mark.parametrize(
    ("strategy", "nodes", "fits"),
    [
        ("PACK", [2, 2], True),
        ("SPREAD", [2, 2], True),
        ("STRICT_PACK", [2, 2], True),
        ("STRICT_PACK", [2, 1], False),  # the first group took one of the two
        ("STRICT_SPREAD", [2, 1], True),
        ("STRICT_SPREAD", [3], False),
    ],
)
def test_what_the_first_group_leaves_must_do_for_the_second(strategy: str, nodes: list, fits: bool):
    run = workers(
        placement={"mode": {"engine": "dedicated"}, "strategy": strategy},
        learner={"num_workers": 2},
        rollout={"engine": {"count": 1}},
    )
    cluster = [{"CPU": float(n)} for n in nodes]
    if fits:
        assert len(lay_out(run, cluster, use_gpu=False)) == 3
    else:
        with pytest.raises(PlacementError):
            lay_out(run, cluster, use_gpu=False)


@pytest.mark.parametrize(
    ("strategy", "cluster"),
    [("PACK", "3xGPU80G"), ("STRICT_SPREAD", "8xGPU80G,3"), ("STRICT_PACK", "2xGPU80G,2")],
)
def test_a_dedicated_group_that_does_not_fit_is_refused_with_who_asks(strategy: str, cluster: str):
    run = config(engines=2, strategy=strategy)
    with pytest.raises(PlacementError) as caught:
        lay_out(run, nodes_of(cluster), use_gpu=True)
    text = str(caught.value)
    assert text.startswith("placement.mode: the dedicated group (1 CPU, 1 GPU for engine:0; ")
    assert f") does not fit the cluster under placement.strategy {strategy}. It has " in text


def test_groups_side_by_side_hold_all_their_bundles():
    def fit(strategy: str, *cpus: float) -> int:
        return count_group_copies(
            [bundles(2, CPU=1)], [{"CPU": n} for n in cpus], strategy, max_copies=99
        )

    assert fit("PACK", 3, 3) == fit("SPREAD", 3, 3) == fit("STRICT_SPREAD", 3, 3) == 3
    assert fit("STRICT_PACK", 3, 3) == 2
    assert fit("STRICT_SPREAD", 5, 1) == 1
    one = [bundles(1, CPU=1)]
    assert count_group_copies(one, nodes_of("1xGPU80G"), "PACK", max_copies=7) == 7
    two = [bundles(1, CPU=2), bundles(3, CPU=1)]
    assert count_group_copies(two, [{"CPU": 9.0}], "PACK", max_copies=7) == 1
    assert count_group_copies(two, [{"CPU": 4.0}, {"CPU": 6.0}], "PACK", max_copies=7) == 2


def frozen(count: int | Literal["auto"], **more: Any) -> ServedRole:
    asked = "reference", "reference", "path", FrozenSection(), "colocated", count, 0.5
    return ServedRole(*asked, **more)


def test_the_first_workers_of_replicas():
    assert first_workers(frozen("auto"), list("aabcc")) == [0, 2, 3]
    assert first_workers(frozen(2), list("aaaaa")) == [0, 2]
    assert first_workers(frozen(1), list("ab")) == [0]


def test_on_gpus_as_many_workers_as_share_a_replica_have_one():
    everywhere = frozen("auto", on_every_device=True)
    assert first_workers(everywhere, list("aabcc")) == [0, 1, 2, 3, 4]
    two = FrozenSection(backend="vllm", tensor_parallel=2)
    pairs = replace(everywhere, section=two)
    assert first_workers(pairs, list("aaaabbbb")) == [0, 2, 4, 6]
    assert first_workers(pairs, list("aaabbb")) == [0, 3], "none spans two nodes"
    assert first_workers(frozen(3, on_every_device=True), list("aaaaaa")) == [0, 2, 4]


def test_the_recipes_without_frozen_models_refuse_the_mode():
    from raypo.config import SFTConfig

    values = {
        "name": "s",
        "recipe": "sft",
        "model": {"policy": "p"},
        "data": {"prompts": "d.jsonl", "response_key": "r"},
        "placement": {"mode": "dedicated"},
    }
    with pytest.raises(ConfigError, match="the recipe sft has no role that could have a dedicated"):
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
            "colocated",
            {"frozen": {"reward": {"backend": "vllm", "tensor_parallel": 2}}},
            r"reward\.tensor_parallel \(2\): .* of 2 learner workers, but there are 1 .* or "
            r"placement\.mode to dedicated",
        ),
        (
            "dedicated",
            {"frozen": {"reference": {"backend": "vllm", "tensor_parallel": 2}}},
            r"placement\.gpus\.reference \(0\.5\): .* uses whole GPUs\. Set it to 1",
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


LABELLED = [
    LabelledResources({"CPU": 4.0}, {NODE_ID_LABEL: "a"}),
    LabelledResources({"CPU": 4.0}, {NODE_ID_LABEL: "b", "tier": "gold", "spot": "yes"}),
    LabelledResources({"CPU": 4.0}, {NODE_ID_LABEL: "c", "tier": "silver"}),
]


@pytest.mark.parametrize(
    ("selector", "nodes"),
    [
        ({}, [0, 1, 2]),
        ({"tier": "gold"}, [1]),
        ({"tier": "!gold"}, [0, 2]),
        ({"tier": "in(gold, silver)"}, [1, 2]),
        ({"tier": "!in(gold,silver)"}, [0]),
        ({"tier": "in(gold, silver)", "spot": "!yes"}, [2]),
    ],
)
def test_a_selector_matches_labels_by_rays_rules(selector: dict[str, str], nodes: list[int]):
    """`tests/slow/test_autoscaler.py` shows Ray's own."""
    assert [n for n, node in enumerate(LABELLED) if matches(selector, node.labels)] == nodes


def test_each_role_lies_on_nodes_with_its_labels():
    run = config(
        {"engine": "dedicated", "reward": "dedicated"},
        engines=2,
        label_selector={"learner": {"tier": "silver"}, "engine": {"spot": "yes"}},
    )
    made = lay_out(run, LABELLED, use_gpu=False)
    nodes = {str(occupant): each.node for each in made for occupant in each.bundle.occupants}
    assert nodes["engine:0"] == nodes["engine:1"] == 1
    assert nodes["learner worker 0"] == nodes["reference:0"] == 2
    assert {nodes["reward_0:0"], nodes["reward_1:0"]} <= {0, 1, 2}
    assert [dict(each.bundle.labels) for each in made[:2]] == [{"spot": "yes"}] * 2
    everywhere = config(label_selector={"tier": "gold"})
    assert {each.node for each in lay_out(everywhere, LABELLED, use_gpu=False)} == {1}


def test_a_bundle_with_labels_gets_its_node_before_one_without():
    loose, tied = bundles(1, CPU=4), [Bundle({"CPU": 4.0}, (), {"tier": "gold"})]
    assert place([*loose, *tied], LABELLED[1:], "PACK") == {1: 0, 0: 1}


def test_replicas_with_different_labels_share_no_gpu():
    run = config(engines=1, label_selector={"reference": {"tier": "gold"}})
    assert layout(run) == [
        "1 CPU, 1 GPU for engine:0",
        "1 CPU, 1 GPU with tier=gold for reference:0",
        "1 CPU, 1 GPU for reward_0:0, reward_1:0",
    ]


def test_labels_that_no_node_has_are_refused_with_those_that_there_are():
    run = workers(placement={"label_selector": {"tier": "brass"}})
    with pytest.raises(PlacementError) as caught:
        lay_out(run, LABELLED, use_gpu=False)
    assert str(caught.value) == (
        "placement.label_selector ({'tier': 'brass'}): no node matches it, for learner worker 0; "
        "the cluster has 1 node without labels; 1 node with spot=yes, tier=gold; 1 node with "
        "tier=silver. Correct it, or add nodes that were started with these labels (ray start "
        "--labels)."
    )
    assert lay_out(run, [{"CPU": 4.0}], use_gpu=False), "a text of a cluster names no labels"


def test_too_few_nodes_with_the_labels_are_counted_without_the_others():
    run = workers(placement={"label_selector": {"tier": "gold"}}, learner={"num_workers": 5})
    with pytest.raises(
        PlacementError, match=r"has 4 CPU on 1 node with tier=gold, and the largest"
    ):
        lay_out(run, LABELLED, use_gpu=False)


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ({"tier": "gold,silver"}, r"label_selector \(tier: gold,silver\): Ray selects by v, !v"),
        (
            {"engine": {"tier": "gold"}},
            r"label_selector.engine \(.*\): has no effect, because a coloc",
        ),
        ({"critic": {"tier": "gold"}}, "label_selector.critic: must be one of learner, engine"),
        ({"learner": {"tier": ""}}, r"label_selector.learner \(tier: \): Ray selects by"),
    ],
)
def test_a_selector_that_ray_would_refuse_or_that_has_no_effect(selector: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        config("colocated", label_selector=selector)
