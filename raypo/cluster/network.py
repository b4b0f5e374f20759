"""Network interfaces of this machine, to choose the interface that gloo uses."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import psutil

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address, or None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(interface_address.address == address for interface_address in addresses):
            return name
    return None


def is_loopback(host: str) -> bool:
    """Return True if a host name resolves to the loopback interface, or does not resolve."""
    try:
        return ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:  # gloo then uses the loopback interface
        return True
