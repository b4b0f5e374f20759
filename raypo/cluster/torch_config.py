"""Ray Train's torch backend, with a check of the workers' GPUs and network.

Ray Train's controller imports this module, so it must not import model code.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from dataclasses import asdict
from ipaddress import ip_address
from typing import Any

import ray.util
from ray.train.torch import TorchConfig

from raypo.cluster.devices import check_granted

_Usual: Any = TorchConfig().backend_cls


class CheckedBackend(_Usual):
    """Backend that explains why torch cannot use a GPU. NCCL would only report none.

    It also makes gloo use the network interface by which the nodes reach each other.
    """

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Prepare all workers, before the controller connects them."""
        worker_group.execute(prepare_worker, len(worker_group))
        super().on_start(worker_group, backend_config)


GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of an interface."""


def prepare_worker(num_workers: int) -> None:
    """Check a worker's GPUs, and set gloo's interface unless the user has set it.

    Gloo takes the interface of the host's name. On many systems (127.0.1.1 in Debian's /etc/hosts)
    that is the loopback interface, which no other node can reach.

    Raises:
        ConfigError: the worker cannot use its GPUs.
    """
    check_granted(num_workers)
    if num_workers > 1 and GLOO_INTERFACE not in os.environ and is_loopback(socket.gethostname()):
        name = interface_of(ray.util.get_node_ip_address())
        if name is not None:
            os.environ[GLOO_INTERFACE] = name


def interface_of(address: str) -> str | None:
    """Return the network interface that has an IPv4 address, or None if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has no IPv4 address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def is_loopback(host: str) -> bool:
    """Return True if a host's name leads to the loopback interface, or to no address."""
    try:
        return ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:  # gloo then uses the loopback interface
        return True


class CheckedTorchConfig(TorchConfig):
    """Ray Train's TorchConfig with `CheckedBackend`."""

    @classmethod
    def of(cls, given: TorchConfig | None) -> TorchConfig:
        """Return the config with the check added.

        Args:
            given: Values of the config. None means the defaults. An instance of a subclass is
                returned unchanged, without the check.
        """
        if given is None:
            return cls()
        return cls(**asdict(given)) if type(given) is TorchConfig else given

    @property
    def backend_cls(self) -> Any:
        """Backend that sets up the workers' process group."""
        return CheckedBackend
