"""Workers look at the GPUs that Ray gave them before they are connected."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray.train.torch import TorchConfig

from raypo.cluster import torch_config
from raypo.cluster.torch_config import CheckedTorchConfig
from raypo.config import ConfigError


class Group:
    """One worker, in this process."""

    def execute(self, function: Any) -> None:
        function()


def start(monkeypatch: pytest.MonkeyPatch, gpus: list[str]) -> list[Any]:
    """Set up one worker that was given these GPUs; what Ray's own backend was then asked."""
    asked: list[Any] = []
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": gpus})
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.0.0.3")
    monkeypatch.setattr(torch_config._Usual, "on_start", lambda _, *given: asked.append(given))
    given, group = CheckedTorchConfig.of(TorchConfig(timeout_s=7)), Group()
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
