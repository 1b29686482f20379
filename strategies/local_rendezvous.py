"""Where the processes of a one-machine run meet: a store that listens on loopback only."""

from __future__ import annotations

import socket

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

LOOPBACK = "127.0.0.1"


class LocalRendezvous(RendezvousHandler):
    """A meeting of one node, whose workers use the same store."""

    def get_backend(self) -> str:
        """Return the name that stands in elastic's logs."""
        return "echelon-local"

    @property
    def use_agent_store(self) -> bool:
        """Whether workers join the store made here, where rank 0 would else open a port on every interface."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store."""
        # Left to itself, a TCPStore listens on all interfaces.
        listener = socket.socket()
        listener.bind((LOOPBACK, 0))
        port = listener.getsockname()[1]
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        """Return False: whoever holds it may meet again."""
        return False

    def set_closed(self) -> None:
        """Do nothing; nobody else could come."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other node is known."""
        return 0

    def get_run_id(self) -> str:
        """Return an id that nobody has to tell from others."""
        return "local"

    def shutdown(self) -> bool:
        """Do nothing: the store ends with its last holder."""
        return True
