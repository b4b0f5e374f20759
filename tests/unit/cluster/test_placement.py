"""What can never fit is refused in a sentence; no Ray is started."""

import pytest

from raypo.cluster.placement import (
    Demand,
    PlacementError,
    check_feasible,
    check_group,
    check_together,
)


def demand(count: int, **bundle: float) -> Demand:
    return Demand(role="learner workers", bundle=bundle, count=count, remedy="Lower something.")


def test_what_fits_passes():
    check_feasible(demand(2, CPU=2, GPU=1), [{"CPU": 4, "GPU": 2}])
    check_feasible(demand(2, CPU=2), [{"CPU": 2}, {"CPU": 2}])


def test_too_little_in_all_says_what_is_asked_and_what_there_is():
    with pytest.raises(PlacementError) as caught:
        check_feasible(demand(4, GPU=1), [{"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 1}])
    assert str(caught.value) == (
        "learner workers: asks for 4 x 1 GPU = 4 GPU; the cluster has 3 GPU on 2 nodes, the "
        "largest has 2. Lower something."
    )


def test_a_bundle_must_fit_one_node():
    with pytest.raises(PlacementError, match="the largest has 2"):
        check_feasible(demand(1, CPU=4), [{"CPU": 2}, {"CPU": 2}])


def test_a_resource_that_nobody_has_is_refused():
    with pytest.raises(PlacementError, match="the cluster has 0 GPU on 1 node"):
        check_feasible(demand(1, GPU=1), [{"CPU": 2}])


@pytest.mark.parametrize(
    ("strategy", "nodes", "room"),
    [
        ("PACK", [4, 2], 1),  # 3 + 3 fit 6 in all, but not 4 and 2
        ("STRICT_PACK", [4, 4], 1),
        ("STRICT_SPREAD", [8], 1),
    ],
)
def test_bundles_must_fit_the_nodes_under_the_strategy(strategy: str, nodes: list, room: int):
    with pytest.raises(PlacementError, match=f"{strategy} the cluster's .* have room for {room}"):
        check_feasible(demand(2, CPU=3), [{"CPU": n} for n in nodes], strategy=strategy)
    check_feasible(demand(2, CPU=2), [{"CPU": 4}, {"CPU": 2}], strategy="SPREAD")


def test_groups_that_fit_alone_but_not_together_are_refused_with_a_table():
    dedicated = Demand("dedicated engine:0", {"CPU": 1, "GPU": 1}, 1, "Set placement.mode.")
    with pytest.raises(PlacementError) as caught:
        check_together([dedicated, demand(2, CPU=1, GPU=1)], [{"CPU": 8, "GPU": 2}])
    assert str(caught.value) == (
        "placement.mode: the groups do not fit the cluster at the same time under "
        "placement.strategy PACK:\n"
        "                        bundles  each          in all\n"
        "  dedicated engine:0    1        1 CPU, 1 GPU  1 CPU, 1 GPU\n"
        "  learner workers       2        1 CPU, 1 GPU  2 CPU, 2 GPU\n"
        "  the cluster (1 node)                         8 CPU, 2 GPU\n"
        "  its largest node                             8 CPU, 2 GPU\n"
        "Set placement.mode. Lower something."
    )
    check_together([dedicated, demand(2, CPU=1, GPU=1)], [{"CPU": 8, "GPU": 3}])


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
    demands = [demand(1, CPU=1), demand(2, CPU=1)]
    cluster = [{"CPU": n} for n in nodes]
    if fits:
        check_together(demands, cluster, strategy=strategy)
    else:
        with pytest.raises(PlacementError):
            check_together(demands, cluster, strategy=strategy)


@pytest.mark.parametrize(
    ("strategy", "nodes"), [("STRICT_PACK", [4, 4]), ("STRICT_SPREAD", [4, 4]), ("PACK", [])]
)
def test_unlike_bundles_of_one_group_must_fit_the_strategy_together(strategy: str, nodes: list):
    demands = [demand(2, CPU=1, GPU=2), demand(1, CPU=1, GPU=1)]  # 5 GPUs, 3 bundles
    cluster = [{"CPU": 8.0, "GPU": float(gpus)} for gpus in nodes]
    if strategy == "PACK":
        check_group(demands, cluster, strategy=strategy)
        return
    with pytest.raises(PlacementError, match=f"one group do not fit .* {strategy}"):
        check_group(demands, cluster, strategy=strategy)
    check_group(demands, [*cluster, {"CPU": 8.0, "GPU": 5.0}], strategy=strategy)
    check_group([], cluster, strategy=strategy)
