"""The NOSET flags of each kind of accelerator: passed on, checked, and used for replicas."""

import pytest

from raypo.cluster.devices import NOSET, check_choice, narrowed, shown, together, users_choice
from raypo.config import ConfigError

KINDS = pytest.mark.parametrize(("variable", "flag"), NOSET.items())


@KINDS
def test_a_flag_and_its_devices_reach_the_workers(variable: str, flag: str):
    assert users_choice({flag: "1", variable: "0,1", "OTHER": "2"}) == {flag: "1", variable: "0,1"}
    assert users_choice({flag: "true"}) == {flag: "true"}
    assert users_choice({flag: "0", variable: "0,1"}) == {}, "Ray's own choice holds"


@KINDS
def test_a_flag_without_devices_is_refused_where_there_are_any(variable: str, flag: str):
    with pytest.raises(ConfigError, match=rf"^{flag} \(1\): .*Set {variable} .* or unset {flag}"):
        check_choice(has_devices=True, environ={flag: "1"})
    check_choice(has_devices=False, environ={flag: "1"})
    check_choice(has_devices=True, environ={flag: "1", variable: "0"})
    check_choice(has_devices=True, environ={flag: "0"})


def test_a_replica_is_shown_its_workers_devices_and_ray_leaves_them_alone():
    assert shown(["2", "3"]) == {"CUDA_VISIBLE_DEVICES": "2,3", NOSET["CUDA_VISIBLE_DEVICES"]: "1"}
    assert shown(["2"], is_rocm=True) == {
        "HIP_VISIBLE_DEVICES": "2",
        NOSET["HIP_VISIBLE_DEVICES"]: "1",
    }
    assert shown([]) == {}


@pytest.mark.parametrize("is_rocm", [False, True])
def test_a_tensor_parallel_engine_is_shown_the_devices_of_all_its_workers(is_rocm: bool):
    workers = [shown([device], is_rocm=is_rocm) for device in ("2", "0")]
    assert together(workers) == shown(["2", "0"], is_rocm=is_rocm)
    assert together([shown([]), shown([])]) == {}


def test_a_dedicated_replica_sees_its_own_devices_where_ray_shows_all():
    """The user has listed all of a node's devices for Ray Train's workers."""
    for variable, flag in NOSET.items():
        environ = {flag: "1", variable: "0,1,2,3"}
        assert narrowed(["2"], environ) == {variable: "2"}
        assert narrowed([], environ) == {}
        assert narrowed(["2"], {variable: "2"}) == {}
