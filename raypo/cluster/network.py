"""Network interfaces of this machine, and the one that gloo takes."""

from __future__ import annotations

import socket
from ipaddress import ip_address

import psutil

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address, or None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(own.address == address for own in addresses):
            return name
    return None


def is_loopback(host: str) -> bool:
    """Return True if a host's name leads to the loopback interface, or to no address."""
    try:
        return ip_address(socket.gethostbyname(host)).is_loopback
    except OSError:  # gloo then uses the loopback interface
        return True
