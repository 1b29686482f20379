"""TCP stores that listen on one address only, and connections to them that time out; torch's do neither."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import stat
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from .environment import LOOPBACK


def host_store(address: str, port: int, limit: timedelta | None = None) -> Any:
    """Return a `TCPStore` that this process hosts; its ``port`` is the actual one if 0 was requested.

    Args:
        address: the address to listen on.
        port: the port; 0 for any free one.
        limit: the timeout of its calls; torch's default if None.

    Raises:
        OSError: if the port is taken, or the address does not belong to this machine.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as its documentation has it

    listener = listen_on_address(address, port)
    port = listener.getsockname()[1]
    timeout: dict[str, Any] = {} if limit is None else {"timeout": limit}
    file = listener.detach()
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=file, **timeout)


def listen_on_address(address: str, port: int) -> socket.socket:
    """Return a socket that listens on an IP address only, or on all interfaces for a name other than localhost.

    A machine's name often resolves to loopback on the machine itself, and to another address elsewhere.
    """
    address = LOOPBACK if address == "localhost" else address
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=is_dual)
    return socket.create_server((address, port), family=socket.AF_INET6 if version == 6 else socket.AF_INET)


def connect_store(address: str, port: int, limit: timedelta) -> Any:
    """Return a client of the store at an address.

    torch waits forever for the first answer of a server that accepts a connection and stays silent (torch 2.14).
    Therefore another thread shuts its connection down, and any that follows, since torch may retry (2.11).

    Raises:
        RuntimeError: if there is no store within `limit`; torch's errors are subclasses of it.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as its documentation has it

    before = {os.fstat(each.fileno()).st_ino for each in connections_to(port)}

    has_returned = threading.Event()

    def end() -> None:
        wait = limit.total_seconds()
        while not has_returned.wait(wait):
            wait = 0.1
            for connection in connections_to(port):
                if os.fstat(connection.fileno()).st_ino not in before:
                    with contextlib.suppress(OSError):  # it is closed already
                        connection.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=end, daemon=True).start()
    try:
        return TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=limit)
    finally:
        has_returned.set()


def connections_to(port: int) -> Iterator[socket.socket]:
    """Yield this process's connections to a port of any machine, on Linux; each as a duplicate that is then closed."""
    descriptors = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    for name in map(int, descriptors):
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed already
            if stat.S_ISSOCK(os.stat(name).st_mode):
                with socket.socket(fileno=os.dup(name)) as connection:
                    is_inet = connection.family in (socket.AF_INET, socket.AF_INET6)
                    if is_inet and connection.getpeername()[1] == port:
                        yield connection
