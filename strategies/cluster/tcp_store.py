"""TCP store that listens on one address; torch's own listens on every interface of the machine."""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from typing import Any


def host_store(address: str, port: int, limit: timedelta | None = None) -> Any:
    """Return a `TCPStore` that this process hosts; its ``port`` is the actual one if 0 was requested.

    Args:
        address: the address on which it listens.
        port: the port; 0 for any free one.
        limit: how long its calls wait; torch's default if None.

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
    """Return a socket that listens on an IP address only, and for a name on all interfaces.

    A machine's name often leads to loopback on that machine, and to another address from elsewhere.
    """
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
    return socket.create_server((address, port), family=socket.AF_INET6 if version == 6 else socket.AF_INET)
