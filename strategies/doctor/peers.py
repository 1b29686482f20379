"""Peers: the nodes of a launch measure the network between them, and compare their clocks, versions and folders."""

from __future__ import annotations

import contextlib
import errno
import json
import platform
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ...common.errors import ProcessError
from ..cluster.environment import DEFAULT_PORT, ENVIRON, Environment
from ..cluster.network import address_towards
from ..cluster.tcp_store import connect_store, host_store
from ..cluster.version import VERSION
from .finding import Finding
from .folder import marking_folder

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PATIENCE: Final = 60.0
"""Seconds to wait for the other nodes."""

_NUM_PINGS: Final = 20
_BLOCK: Final = 8 << 20
"""Bytes sent to measure the bandwidth."""
_LIMIT: Final = 10.0
"""Seconds for one measurement."""
_SLOW: Final = 5e-3
"""Seconds that a round trip between nodes of one network should not exceed."""
_SKEW: Final = 1.0
_PREFIX: Final = "echelon/doctor"
_CLOCK: Final = struct.Struct("!d")
_SIZE: Final = struct.Struct("!Q")


@dataclass(frozen=True)
class Way:
    """The network path from one node to another."""

    latency: float | None
    """Seconds for a round trip; None if the other node cannot be reached."""
    bandwidth: float | None = None
    """Bytes per second; None if a large message does not arrive."""
    clock: float = 0.0
    """Seconds by which the other node's clock is ahead."""
    error: str = ""


@dataclass(frozen=True)
class NodeReport:
    """The findings of one node."""

    node: int
    name: str
    address: str
    versions: Mapping[str, str]
    findings: Sequence[Finding]
    ways: Sequence[Way]
    """To each node, by rank; the entry for the node itself is unused."""


def measure_peers(environment: Environment, own: Sequence[Finding], run_folder: Path) -> list[NodeReport]:
    """Measure the path to all other nodes of a launch; return the reports of all. Collective: each node calls it once.

    Only addresses that the nodes themselves have published in the store of the launch are contacted.

    Args:
        environment: of this process, the first of its node.
        own: what this machine's own checks have found.
        run_folder: where the run will write.

    Raises:
        ProcessError: for a node that did not answer, or that cannot reach the store.
    """
    store = _open_store(environment)
    node, number = environment.node_rank, environment.num_nodes
    address = address_towards(environment.main_address)
    token = f".echelon-doctor-{environment.main_port}"
    with (
        _answering_peers(address) as port,
        marking_folder(run_folder, token) if node == 0 else contextlib.nullcontext(),
    ):
        me: dict[str, Any] = {
            "name": socket.gethostname(),
            "address": address,
            "port": port,
            "versions": versions_to_compare(),
        }
        store.set(f"node/{node}", json.dumps(me))
        others = [json.loads(_wait_for_key(store, f"node/{peer}", peer)) for peer in range(number)]
        is_shared = (run_folder / token).exists()
        ways = [Way(0.0)] * number
        for step in range(1, number):  # in each round, every node measures a different peer
            peer = (node + step) % number
            ways[peer] = measure_way(others[peer]["address"], others[peer]["port"])
        found = [*own, *_compare_nodes(node, others, ways, is_shared=is_shared, run_folder=run_folder)]
        report = NodeReport(node, me["name"], address, me["versions"], found, ways)
        store.set(f"report/{node}", json.dumps(asdict(report)))
        # the reports are complete once nobody measures any longer
        reports = [_parse_report(_wait_for_key(store, f"report/{peer}", peer)) for peer in range(number)]
        store.add("done", 1)
        end = time.monotonic() + _LIMIT  # the node that hosts the store leaves last
        while node == 0 and store.add("done", 0) < number and time.monotonic() < end:
            time.sleep(0.02)
    return reports


def versions_to_compare() -> dict[str, str]:
    """Return the versions that must be equal on all nodes."""
    return {
        "echelon": VERSION,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "CUDA": torch.version.cuda or "none",
    }


def measure_way(address: str, port: int) -> Way:
    """Measure and return the path to a node that answers at an address."""
    try:
        connection = socket.create_connection((address, port), 3.0)
    except OSError as error:
        return Way(None, error=_describe_error(error))
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_LIMIT)
        try:
            trips = [_ping_peer(connection) for _ in range(_NUM_PINGS)]
        except OSError as error:
            return Way(None, error=_describe_error(error))
        latency, clock = min(trips)
        try:
            begin = time.perf_counter()
            connection.sendall(b"b" + _SIZE.pack(_BLOCK) + bytes(_BLOCK))
            _receive_bytes(connection, 1)
            seconds = time.perf_counter() - begin - latency
        except OSError as error:
            return Way(latency, None, clock, _describe_error(error))
    return Way(latency, _BLOCK / max(seconds, 1e-6), clock)


@contextlib.contextmanager
def _answering_peers(address: str) -> Iterator[int]:
    """Answer the measurements of other nodes inside the block, at the port that is yielded."""
    with socket.create_server((address, 0), backlog=128) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):  # the server was closed
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=_answer_peer, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, name="echelon-doctor", daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def _answer_peer(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError, ValueError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(2 * _LIMIT)
        while kind := connection.recv(1):
            if kind == b"b":
                [size] = _SIZE.unpack(_receive_bytes(connection, _SIZE.size))
                if size > _BLOCK:
                    raise ValueError(f"a block of {size} bytes; at most {_BLOCK} are sent")
                _receive_bytes(connection, size)
                connection.sendall(b"k")
            else:
                connection.sendall(_CLOCK.pack(time.time()))


def _ping_peer(connection: socket.socket) -> tuple[float, float]:
    """Return the time of a round trip, and by how much the other's clock is ahead."""
    clock, begin = time.time(), time.perf_counter()
    connection.sendall(b"p")
    [theirs] = _CLOCK.unpack(_receive_bytes(connection, _CLOCK.size))
    trip = time.perf_counter() - begin
    return trip, theirs - (clock + trip / 2)


def _receive_bytes(connection: socket.socket, size: int) -> bytes:
    """Return `size` bytes."""
    received = bytearray()
    while len(received) < size:
        part = connection.recv(min(size - len(received), 1 << 20))
        if not part:
            raise OSError(errno.ECONNRESET, "the connection was closed")
        received += part
    return bytes(received)


def _compare_nodes(
    node: int, others: Sequence[Mapping[str, Any]], ways: Sequence[Way], *, is_shared: bool, run_folder: Path
) -> Iterator[Finding]:
    """Yield what is wrong between this node and the others."""
    for peer, way in enumerate(ways):
        if peer == node:
            continue
        where = f"node {peer} ({others[peer]['name']}, {others[peer]['address']})"
        if way.latency is None:
            yield Finding(
                "network",
                f"{where} cannot be reached ({way.error})",
                "let nodes connect to each other on all ports: check the routes (ip route) and firewalls of both",
            )
        elif way.bandwidth is None:
            yield Finding(
                "network",
                f"{where} answers but does not receive large messages ({way.error})",
                "give all interfaces on the way the same MTU: ip link set ... mtu 1500",
            )
        elif way.latency > _SLOW:
            yield Finding(
                "network",
                f"{where} has a round-trip time of {way.latency * 1000:.1f} ms",
                "use nodes of the same network, or another interface: export GLOO_SOCKET_IFNAME=... "
                "NCCL_SOCKET_IFNAME=...",
                stops=False,
            )
        if node == 0 and abs(way.clock) > max(_SKEW, way.latency or 0.0):
            yield Finding(
                "clock",
                f"the clock of {where} is {way.clock:+.1f} s off that of node 0",
                "timedatectl set-ntp true, or chronyc makestep, on both",
                stops=False,
            )
    yield from compare_versions(node, others[node]["versions"], others[0]["versions"])
    if not is_shared:
        yield Finding(
            "run folder",
            f"{run_folder} is not the same folder on node {node} and on node 0: sharded checkpoints and resuming need "
            "a shared one",
            "mount a file system that all nodes share, and give its path to --folder and as default_root_dir",
            stops=False,
        )


def compare_versions(node: int, own: Mapping[str, str], first: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding for each version in which a node differs from node 0."""
    for name, version in first.items():
        if own.get(name) != version:
            yield Finding(
                "versions",
                f"{name} is {own.get(name)} on node {node}, but {version} on node 0",
                f"pip install {name.lower()}=={version}"
                if name in ("torch", "echelon")
                else f"install {name} {version} there",
                stops=name != "Python",
            )


def _open_store(environment: Environment) -> Any:
    """Return the store of the launch, or one that the first node starts.

    Raises:
        ProcessError: if it cannot be reached.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # as its documentation has it

    limit, address, port = timedelta(seconds=PATIENCE), environment.main_address, environment.main_port or DEFAULT_PORT
    is_there = ENVIRON.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        if environment.node_rank == 0 and not is_there:
            return PrefixStore(_PREFIX, host_store(address, port, limit))
        return PrefixStore(_PREFIX, connect_store(address, port, limit))
    except (OSError, RuntimeError) as error:
        raise ProcessError(
            f"Node {environment.node_rank} cannot reach the store at {address}:{port} ({str(error)[:100]}); run "
            f"`echelon doctor --rdzv {address}:{port}` on this node to see why."
        ) from error


def _wait_for_key(store: Store, key: str, node: int) -> bytes:
    """Return what a node has written under a key of the store.

    Raises:
        ProcessError: if it does not come in time.
    """
    try:
        value: bytes = store.get(key)
    except Exception as error:
        raise ProcessError(
            f"Node {node} did not answer within {PATIENCE:g} s; start the doctor on every node, and see the output "
            "there."
        ) from error
    return value


def _parse_report(text: bytes) -> NodeReport:
    values = json.loads(text)
    values["findings"] = [Finding(**one) for one in values["findings"]]
    values["ways"] = [Way(**one) for one in values["ways"]]
    return NodeReport(**values)


def _describe_error(error: OSError) -> str:
    return "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
