"""Ray Train's torch backend, with a check of the workers' GPUs and network.

Ray Train's controller imports this module, so it must not import model code.
"""

from __future__ import annotations

import os
import socket
from dataclasses import asdict
from typing import Any

import ray.util
from ray.train.torch import TorchConfig

from raypo.cluster.devices import check_granted
from raypo.cluster.network import GLOO_INTERFACE, interface_of, is_loopback

_Usual: Any = TorchConfig().backend_cls


class CheckedBackend(_Usual):
    """Backend that explains why torch cannot use a GPU. NCCL would only report none.

    It also makes gloo use the network interface by which the nodes reach each other.
    """

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Prepare all workers, before the controller connects them."""
        worker_group.execute(prepare_worker, len(worker_group))
        super().on_start(worker_group, backend_config)


def prepare_worker(num_workers: int) -> None:
    """Check a worker's GPUs, and set gloo's interface unless the user has set it.

    Gloo takes the interface of the host's name. On many systems (127.0.1.1 in Debian's /etc/hosts)
    that is the loopback interface, which no other node can reach. A Ray that raypo has started is
    on the loopback interface; its workers listen nowhere else.

    Raises:
        ConfigError: the worker cannot use its GPUs.
    """
    check_granted(num_workers)
    node, host = ray.util.get_node_ip_address(), socket.gethostname()
    is_other = is_loopback(host) != is_loopback(node)
    if num_workers > 1 and GLOO_INTERFACE not in os.environ and is_other:
        name = interface_of(node)
        if name is not None:
            os.environ[GLOO_INTERFACE] = name


class CheckedTorchConfig(TorchConfig):
    """Ray Train's TorchConfig with `CheckedBackend`."""

    @classmethod
    def of(cls, config: TorchConfig | None) -> TorchConfig:
        """Return the config with the check added.

        Args:
            config: Values of the config. None means the defaults. An instance of a subclass is
                returned unchanged, without the check.
        """
        if config is None:
            return cls()
        return cls(**asdict(config)) if type(config) is TorchConfig else config

    @property
    def backend_cls(self) -> Any:
        """Backend that sets up the workers' process group."""
        return CheckedBackend
