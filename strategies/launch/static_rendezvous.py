"""Where the agents of a run's nodes meet: a store on the first node, on loopback when there is no other."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # as its documentation has it
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from ..cluster.environment import LOOPBACK, Environment
from ..cluster.tcp_store import host_store
from ..errors import ProcessError

_TRY = timedelta(seconds=3)  # after which a node that waits asks again: it may have reached the store of an earlier run

_PAUSE = 0.05  # seconds between two looks at the store
_PREFIX, _OVER = "echelon/nodes", "over"


class Rendezvous(RendezvousHandler):
    """A meeting of a fixed number of nodes, whose workers then use the same store."""

    def __init__(self, environment: Environment, limit: timedelta) -> None:
        self.node_rank, self.num_nodes = environment.node_rank, environment.num_nodes
        self.address = environment.main_address if self.num_nodes > 1 else LOOPBACK
        self.port = environment.main_port or 0
        self.limit = limit
        self._is_cancelled = False
        self.store: Any = None
        """What the agents tell each other by, from the meeting on."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes.

        Raises:
            ProcessError: naming the nodes that did not come in time, or the port that is taken.
        """
        store = self._receive() if self.node_rank == 0 else self._visit()
        self.store = PrefixStore(_PREFIX, store)
        info = RendezvousStoreInfo(self.address, self.port)
        return RendezvousInfo(self.store, self.node_rank, self.num_nodes, info)

    def close(self) -> None:
        """Have nodes that come from now on, for the next run of the same program, wait for a store of their own."""
        self.store.set(_OVER, "")

    def cancel(self) -> None:
        """End the wait for other nodes; from any thread."""
        self._is_cancelled = True

    def _receive(self) -> Any:
        """Open the store, and answer every other node."""
        end = time.monotonic() + self.limit.total_seconds()
        store = self._open()
        keys = [_hello(node) for node in range(1, self.num_nodes)]
        while not store.check(keys):
            if time.monotonic() > end or self._is_cancelled:
                raise self._missing([node for node, key in enumerate(keys, 1) if not store.check([key])])
            time.sleep(_PAUSE)
        for key in keys:
            store.set(_answer(store.get(key).decode()), "")
        return store

    def _open(self) -> Any:
        try:
            # on one machine any port: that of the round before is still taken when workers start again
            store = host_store(self.address, self.port if self.num_nodes > 1 else 0)
        except OSError as error:
            raise ProcessError(
                f"Node 0 cannot listen on {self.address}:{self.port} ({error.strerror}); set MASTER_ADDR to an address "
                "of this machine and MASTER_PORT to a free port, the same on every node."
            ) from error
        self.port = store.port
        return store

    def _visit(self) -> Any:
        """Come to the store of node 0, until it answers."""
        end = time.monotonic() + self.limit.total_seconds()
        missing = [0]
        while (left := end - time.monotonic()) > 0 and not self._is_cancelled:
            try:
                store = TCPStore(self.address, self.port, is_master=False, timeout=min(timedelta(seconds=left), _TRY))
                if self._is_answered(store):
                    return store
                missing = [node for node in range(1, self.num_nodes) if not store.check([_hello(node)])]
            except RuntimeError:  # not there yet, or just gone
                pass
            time.sleep(_PAUSE)
        raise self._missing(missing or [0])

    def _is_answered(self, store: Any) -> bool:
        """Call at a store, which may still be that of an earlier run of the same program."""
        if PrefixStore(_PREFIX, store).check([_OVER]):
            return False
        name = uuid.uuid4().hex
        store.set(_hello(self.node_rank), name)
        end = time.monotonic() + _TRY.total_seconds()
        while not store.check([_answer(name)]):
            if time.monotonic() > end or self._is_cancelled:
                return False
            time.sleep(_PAUSE)
        return True

    def _missing(self, nodes: list[int]) -> ProcessError:
        return ProcessError(
            f"Node {', '.join(map(str, nodes))} of {self.num_nodes} did not come to {self.address}:{self.port} within "
            f"{self.limit.total_seconds():g} s (this is node {self.node_rank}); start the program there too, with its "
            "own NODE_RANK and the same MASTER_ADDR and MASTER_PORT, or wait longer with start_timeout."
        )

    def get_backend(self) -> str:
        """Return the name that stands in elastic's logs."""
        return "echelon"

    @property
    def use_agent_store(self) -> bool:
        """Whether workers join the store made here, where rank 0 would else open a port on every interface."""
        return True

    def is_closed(self) -> bool:
        """Return False: whoever holds it may meet again."""
        return False

    def set_closed(self) -> None:
        """Do nothing; nobody else could come."""

    def num_nodes_waiting(self) -> int:
        """Return 0: the number of nodes is fixed."""
        return 0

    def get_run_id(self) -> str:
        """Return an id that nobody has to tell from others."""
        return "echelon"

    def shutdown(self) -> bool:
        """Do nothing: the store ends with its last holder."""
        return True


def _hello(node: int) -> str:
    return f"echelon/hello/{node}"


def _answer(name: str) -> str:
    return f"echelon/answer/{name}"
