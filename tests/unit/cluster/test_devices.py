"""The NOSET flags of each kind of accelerator: passed on, checked, and used for replicas."""

import pytest
import torch

from raypo.cluster.devices import (
    NOSET,
    check_accelerators,
    check_driver,
    check_noset_flags,
    merged_visibility_env,
    user_visibility_env,
    visibility_env,
    visible_device_env,
)
from raypo.config import ConfigError

KINDS = pytest.mark.parametrize(("variable", "flag"), NOSET.items())


@KINDS
def test_a_flag_and_its_devices_reach_the_workers(variable: str, flag: str):
    assert user_visibility_env({flag: "1", variable: "0,1", "OTHER": "2"}) == {
        flag: "1",
        variable: "0,1",
    }
    assert user_visibility_env({flag: "true"}) == {flag: "true"}
    assert user_visibility_env({flag: "0", variable: "0,1"}) == {}, "Ray's own choice holds"


@KINDS
def test_a_flag_without_devices_is_refused_where_there_are_any(variable: str, flag: str):
    with pytest.raises(ConfigError, match=rf"^{flag} \(1\): .*Set {variable} .* or unset {flag}"):
        check_noset_flags(has_devices=True, environ={flag: "1"})
    check_noset_flags(has_devices=False, environ={flag: "1"})
    check_noset_flags(has_devices=True, environ={flag: "1", variable: "0"})
    check_noset_flags(has_devices=True, environ={flag: "0"})


def test_a_replica_is_shown_its_workers_devices_and_ray_leaves_them_alone():
    assert visibility_env(["2", "3"]) == {
        "CUDA_VISIBLE_DEVICES": "2,3",
        NOSET["CUDA_VISIBLE_DEVICES"]: "1",
    }
    assert visibility_env(["2"], is_rocm=True) == {
        "HIP_VISIBLE_DEVICES": "2",
        NOSET["HIP_VISIBLE_DEVICES"]: "1",
    }
    assert visibility_env([]) == {}


@pytest.mark.parametrize("is_rocm", [False, True])
def test_a_tensor_parallel_engine_is_shown_the_devices_of_all_its_workers(is_rocm: bool):
    workers = [visibility_env([device], is_rocm=is_rocm) for device in ("2", "0")]
    assert merged_visibility_env(workers) == visibility_env(["2", "0"], is_rocm=is_rocm)
    assert merged_visibility_env([visibility_env([]), visibility_env([])]) == {}


def test_a_dedicated_replica_sees_its_own_devices_where_ray_shows_all():
    """The user has listed all of a node's devices for Ray Train's workers."""
    for variable, flag in NOSET.items():
        environ = {flag: "1", variable: "0,1,2,3"}
        assert visible_device_env(["2"], environ) == {variable: "2"}
        assert visible_device_env([], environ) == {}
        assert visible_device_env(["2"], {variable: "2"}) == {}


def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_cpus(monkeypatch: pytest.MonkeyPatch):
    def old_driver() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", old_driver)
    with pytest.raises(ConfigError) as caught:
        check_driver(gpus=8)
    text = str(caught.value)
    assert text.startswith("learner.use_gpu (auto): this machine has 8 GPUs, and torch ")
    assert "is too old (found version 12020). Update the driver" in text
    assert "set learner.use_gpu to false" in text
    check_driver(gpus=0)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    with pytest.raises(
        ConfigError, match=r"cannot use them: it finds no device\. Update the driver"
    ):
        check_driver(gpus=8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_driver(gpus=8)


def test_a_cpu_build_of_torch_is_the_users_own_choice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_driver(gpus=8)
    with pytest.raises(ConfigError, match=r"^learner\.use_gpu \(True\): this machine has 8 GPUs"):
        check_driver(gpus=8, use_gpu=True)


def test_accelerators_that_raypo_cannot_use_are_told_and_not_passed_by():
    with pytest.raises(ConfigError, match=r"^learner\.use_gpu \(auto\): the cluster has NPU"):
        check_accelerators({"CPU": 64.0, "NPU": 8.0})
    check_accelerators({"CPU": 64.0, "NPU": 8.0, "GPU": 8.0})
    check_accelerators({"CPU": 64.0})
