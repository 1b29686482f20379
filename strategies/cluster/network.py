"""Network interfaces of this machine, and the one through which its processes reach other nodes."""

from __future__ import annotations

import socket
import struct
import sys
from typing import Final

from .environment import LOOPBACK

_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_GET_ADDRESS: Final = 0x8915  # Linux's SIOCGIFADDR


def loopback_variables() -> dict[str, str]:
    """Return variables that make the processes of one machine listen on loopback only."""
    names = {name for _, name in socket.if_nameindex()}
    return dict.fromkeys(_INTERFACES, "lo0" if "lo0" in names else "lo")  # macOS and Linux


def variables_towards(host: str) -> dict[str, str]:
    """Return variables that make gloo and tensorpipe listen on the network that leads to `host`, if they would not.

    By default they listen on the address of this machine's name. On Debian, and in many containers, that is loopback.
    """
    try:
        is_reachable = not socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        is_reachable = False
    name = None if is_reachable else interface_of(address_towards(host))
    return dict.fromkeys(_INTERFACES[:2], name) if name is not None else {}


def address_towards(host: str) -> str:
    """Return the address of this machine on the network that leads to `host`.

    Raises:
        OSError: if there is no such host, or no route to it.
    """
    return _find_route(host)[0]


def is_this_machine(host: str) -> bool:
    """Return whether `host` is a name or an address of this machine.

    Raises:
        OSError: if there is no such host, or no route to it.
    """
    own, other = _find_route(host)
    return own == other


def _find_route(host: str) -> tuple[str, str]:
    """Return the addresses at both ends of the route to a host, without sending a packet."""
    [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return probe.getsockname()[0], probe.getpeername()[0]


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address, on Linux; None elsewhere, and for loopback."""
    if sys.platform != "linux" or address == LOOPBACK:
        return None
    import fcntl  # not on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
            except OSError:  # the interface has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
