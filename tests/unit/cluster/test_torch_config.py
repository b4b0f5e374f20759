"""Workers look at the GPUs that Ray gave them before they are connected."""

import os
import socket
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from ray.train.torch import TorchConfig

from raypo.cluster import torch_config
from raypo.cluster.torch_config import CheckedTorchConfig, interface_of
from raypo.config import ConfigError


class Group:
    """Workers, of which the first one is in this process."""

    def __init__(self, count: int = 1) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def execute(self, function: Any, *arguments: Any) -> None:
        function(*arguments)


def start(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], count: int = 1, ip: str = "10.0.0.3"
) -> list[Any]:
    """Set up a worker that was given these GPUs; what Ray's own backend was then asked."""
    asked: list[Any] = []
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": gpus})
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: ip)
    monkeypatch.setattr(torch_config._Usual, "on_start", lambda _, *given: asked.append(given))
    given, group = CheckedTorchConfig.of(TorchConfig(timeout_s=7)), Group(count)
    given.backend_cls().on_start(group, given)  # type: ignore[arg-type]
    assert asked == [(group, given)]
    return asked


def test_a_worker_whose_torch_sees_none_of_its_gpus_says_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    begin = r"^learner\.use_gpu \(True\): a worker on 10\.0\.0\.3 has 1 GPU, and torch "
    with pytest.raises(ConfigError, match=begin):
        start(monkeypatch, ["0"])


def test_with_a_gpu_that_torch_sees_ray_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert start(monkeypatch, ["0"])


def test_what_the_user_has_set_stays():
    own = CheckedTorchConfig.of(TorchConfig(backend="gloo", timeout_s=7))
    assert (own.backend, own.timeout_s) == ("gloo", 7)

    class Other(TorchConfig):
        pass

    other = Other()
    assert CheckedTorchConfig.of(other) is other
    assert isinstance(CheckedTorchConfig.of(None), CheckedTorchConfig)


def test_several_gpus_need_more_shared_memory_than_docker_gives(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=64 << 20))
    with pytest.raises(ConfigError, match=r"^/dev/shm \(0\.0671 GB on .*\): .* at least 1 GB"):
        start(monkeypatch, ["0"], count=2)
    assert start(monkeypatch, ["0"], count=1)
    assert start(monkeypatch, [], count=2), "workers on CPUs exchange nothing through it"


def own_interface() -> tuple[str, str]:
    """Name and address of an interface of this machine, of another one than the loopback's."""
    addresses = {
        name: next((a.address for a in every if a.family == socket.AF_INET), "")
        for name, every in psutil.net_if_addrs().items()
    }
    found = [(name, ip) for name, ip in addresses.items() if ip and not ip.startswith("127.")]
    return found[0] if found else pytest.skip("this machine has only its loopback interface")


@pytest.mark.parametrize(
    ("host", "node", "given", "count", "is_set"),
    [
        ("127.0.1.1", None, None, 2, True),
        ("127.0.1.1", None, None, 1, False),
        ("127.0.1.1", None, "mine", 2, False),
        ("10.0.0.3", None, None, 2, False),
        ("10.0.0.3", "127.0.0.1", None, 2, True),
        ("127.0.1.1", "127.0.0.1", None, 2, False),
    ],
)
def test_gloo_gets_the_interface_of_rays_address_where_the_hosts_name_has_another(
    monkeypatch: pytest.MonkeyPatch,
    host: str,
    node: str | None,
    given: str | None,
    count: int,
    is_set: bool,
):
    name, ip = ("lo", node) if node else own_interface()
    own = socket.gethostname()
    monkeypatch.setattr("socket.gethostbyname", lambda name: host if name == own else name)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if given:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    else:  # so that what is set here does not outlive the test
        monkeypatch.setattr(os, "environ", dict(os.environ))
    start(monkeypatch, [], count=count, ip=ip)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == (name if is_set else given)


def test_an_address_that_no_interface_has_sets_nothing():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.1") is None
