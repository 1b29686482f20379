"""Stores that listen on one address, where torch's own would listen on every interface of the machine."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import Any


def host_store(address: str, port: int, limit: timedelta | None = None) -> Any:
    """Return a `TCPStore` that this process hosts; its ``port`` tells which one it got, if 0 was asked for.

    Args:
        address: where it listens.
        port: 0 for any that is free.
        limit: how long its calls wait; by default as long as torch has it.

    Raises:
        OSError: if the port is taken, or the address is not of this machine.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as its documentation has it

    listener = listen(address, port)
    port = listener.getsockname()[1]
    timeout: dict[str, Any] = {} if limit is None else {"timeout": limit}
    file = listener.detach()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=file, **timeout)


def listen(address: str, port: int) -> socket.socket:
    """Listen on an address only, where a store left to itself listens on all interfaces.

    A name is no such address: a machine's own often stands for loopback on that machine, and for another elsewhere.
    """
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
    return socket.create_server((address, port), family=socket.AF_INET6 if version == 6 else socket.AF_INET)
