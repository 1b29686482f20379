"""Checks of this machine's network: loopback, interfaces, names, ports, and the path to a node that the user names."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import Final

from ..cluster.environment import ENVIRON, LOOPBACK
from ..cluster.network import address_towards, interface_of, is_this_machine
from ..cluster.tcp_store import listen_on_address
from .finding import Finding

_INTERFACES: Final = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_PATIENCE: Final = 3.0
"""Seconds for a connection."""


def check_loopback() -> Iterator[Finding]:
    """Check that processes of this machine reach each other."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            server.settimeout(_PATIENCE)
            with socket.create_connection(server.getsockname(), _PATIENCE):
                server.accept()[0].close()
    except OSError as error:
        yield Finding(
            "loopback",
            f"a connection to {LOOPBACK} fails ({error.strerror or error}): processes of one machine connect to each "
            "other there",
            "ip link set lo up",
        )


def check_interfaces(environ: Mapping[str, str] = ENVIRON) -> Iterator[Finding]:
    """Check that the network interfaces named in environment variables exist."""
    names = {name for _, name in socket.if_nameindex()}
    for variable in _INTERFACES:
        given = environ.get(variable, "")
        # NCCL takes prefixes, and exact names after "="; "^" excludes
        wanted = [] if given.startswith("^") else [name.lstrip("=") for name in given.split(",") if name]
        is_prefix = variable.startswith("NCCL") and not given.startswith("=")
        for one in wanted:
            if one not in names and not (is_prefix and any(name.startswith(one) for name in names)):
                yield Finding(
                    "interfaces",
                    f"{variable}={given} names {one!r}, which does not exist; this machine has "
                    f"{', '.join(sorted(names))}",
                    f"unset {variable}",
                )


def check_port(port: int, address: str = LOOPBACK) -> Iterator[Finding]:
    """Check that the store could listen on a port."""
    try:
        listen_on_address(address, port).close()
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            return  # another check reports it
        with contextlib.closing(listen_on_address(address, 0)) as free:
            other = free.getsockname()[1]
        yield Finding(
            "port",
            f"port {port} of this machine cannot be used ({os.strerror(error.errno)})",
            f"end the process that holds it (ss -ltnp 'sport = :{port}'), or use another port, such as {other}",
        )


def check_name(host: str | None) -> Iterator[Finding]:
    """Check which address this machine's name resolves to, for a run whose nodes meet at `host`."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        yield Finding(
            "name resolution",
            f"this machine's name {name!r} has no address; libraries that look it up wait or fail",
            f"echo '{LOOPBACK} {name}' >> /etc/hosts",
            stops=False,
        )
        return
    if host is not None and address.startswith("127.") and not ENVIRON.get("GLOO_SOCKET_IFNAME"):
        with contextlib.suppress(OSError):
            own = address_towards(host)
            if not ip_address(own.partition("%")[0]).is_loopback:
                interface = interface_of(own)
                export = "" if interface is None else f"export GLOO_SOCKET_IFNAME={interface}, or "
                yield Finding(
                    "name resolution",
                    f"this machine's name {name!r} resolves to {address}, which other nodes cannot reach. Echelon "
                    "works around this; plain torchrun does not",
                    f"{export}give {name} the address {own} in /etc/hosts",
                    stops=False,
                )


def check_way(host: str, port: int) -> Iterator[Finding]:
    """Check that this machine reaches the node whose address the user gives, and no other."""
    try:
        addresses = {str(one[4][0]) for one in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError as error:
        yield Finding(
            "name resolution",
            f"{host!r} has no address ({error.strerror or error})",
            f"give the address itself, or add it to /etc/hosts: echo 'ADDRESS {host}' >> /etc/hosts",
        )
        return
    try:
        if is_this_machine(host):
            yield from check_port(port, host)
            return
    except OSError as error:
        yield Finding(
            "route",
            f"there is no route to {host} ({error.strerror or error}); this machine has {', '.join(_own_addresses())}",
            "give this machine an address in the same network (ip address add ... dev ...), or a route (ip route add)",
        )
        return
    try:
        socket.create_connection((host, port), _PATIENCE).close()
    except ConnectionRefusedError:
        pass  # the node is up, but nobody listens yet
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        yield Finding(
            "route",
            f"{host}:{port} ({', '.join(sorted(addresses))}) cannot be reached ({reason})",
            "check that node: is it up, is its link up (ip link set ... up), does a firewall block the port",
        )


def _own_addresses() -> list[str]:
    names = [name for _, name in socket.if_nameindex()]
    return [f"the interface {name}" for name in names]
