"""What can never fit is refused in a sentence; no Ray is started."""

import pytest

from raypo.cluster.placement import Demand, PlacementError, check_feasible


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
