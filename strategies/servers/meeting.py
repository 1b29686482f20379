"""Meeting of the peers of a run: their store, and the network on which they listen, which nobody else must reach."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from ...common.errors import ConfigError
from ..cluster.environment import LOOPBACK, Environment
from ..cluster.network import address_towards, interface_of, loopback_variables
from ..cluster.tcp_store import connect_store, host_store
from .transport import Peers, Service, Transport


@dataclass(frozen=True)
class Meeting:
    """Where peers meet: at a file on one machine, or at a port of the first node on several."""

    file: Path | None
    address: str = LOOPBACK
    port: int = 0
    main_address: str = LOOPBACK
    """The first node's address; the others listen on the network towards it."""
    hosted: list[object] = field(default_factory=list)
    """The store itself, in the process that hosts it; it ends with this object."""

    @classmethod
    def call(cls, environment: Environment, folder: Path, limit: timedelta) -> Meeting:
        """Return a new meeting; trainer 0 calls it, once for a run."""
        if environment.num_nodes == 1:
            return cls(folder / "peers")
        address = private_address(environment.main_address)
        store = host_store(address, 0, limit)
        return cls(None, address, store.port, environment.main_address, [store])

    def __reduce__(self) -> tuple[object, ...]:
        return Meeting, (self.file, self.address, self.port, self.main_address)

    def join(
        self, name: str, peers: Peers, service: Service, limit: timedelta, is_given_up: threading.Event | None = None
    ) -> Transport:
        """Join the other peers under a name, unless the run is given up. Collective: every peer calls it.

        Raises:
            ConnectionError: if they do not join within `limit`, or are lost.
        """
        from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]  # as its documentation has it

        from .tensorpipe import TensorPipe

        if self.file is not None:
            store: Any = FileStore(str(self.file), len(peers.names))
        else:
            store = self.hosted[0] if self.hosted else connect_store(self.address, self.port, limit)
        store.set_timeout(limit)
        return TensorPipe(
            name,
            peers,
            PrefixStore(peers.token, store),
            service,
            interface=self._interface(),
            start_timeout=limit,
            is_given_up=is_given_up or threading.Event(),
        )

    def _interface(self) -> Mapping[str, str]:
        if self.file is not None:
            return loopback_variables()
        name = interface_of(private_address(self.main_address))
        return {} if name is None else dict.fromkeys(loopback_variables(), name)


def private_address(host: str) -> str:
    """Return the address of this machine towards the first node, on which its processes may listen.

    Raises:
        ConfigError: if it is public: whoever reaches a peer can run anything in it.
    """
    address = address_towards(host)
    if not ipaddress.ip_address(address).is_private:
        raise ConfigError(
            f"MASTER_ADDR must be an address in a private network for parameter servers, got {host!r}, for which this "
            f"machine listens on the public address {address}: anyone who can connect to it can run any program here. "
            "Give node 0's address in a private network that others cannot reach."
        )
    return address
