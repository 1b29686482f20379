"""Rendezvous of a fixed number of nodes over a store that the first one hosts."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # as its documentation has it
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from ...common.errors import ProcessError
from ..cluster.environment import LOOPBACK, Environment
from ..cluster.start_wait import StartWait, unknown_host
from ..cluster.tcp_store import connect_store, host_store
from ..distributed.noticeboard import Messages, Noticeboard

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_ATTEMPT = 3.0  # seconds after which a waiting node reconnects: it may have reached the store of an earlier run
_PAUSE = 0.05  # seconds between two attempts
_PREFIX, _OVER = "echelon/nodes", "over"


class Rendezvous(RendezvousHandler):
    """Rendezvous of a run's agents, whose workers then use the same store; on loopback if there is only one node."""

    def __init__(self, environment: Environment, limit: timedelta) -> None:
        self.node_rank, self.num_nodes = environment.node_rank, environment.num_nodes
        self.address = environment.main_address if self.num_nodes > 1 else LOOPBACK
        self.port = environment.main_port or 0
        self.limit = limit
        self._is_cancelled = False
        self.store: Any = None
        """The store that all agents share once they have met."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes.

        Raises:
            ProcessError: naming the nodes that did not join in time, or the port that is taken.
        """
        self.store = self._host() if self.node_rank == 0 else self._join()
        info = RendezvousStoreInfo(self.address, self.port)
        return RendezvousInfo(self.store, self.node_rank, self.num_nodes, info)

    def close(self) -> None:
        """Make nodes that join from now on, for the next run of the same program, wait for that run's store."""
        _make_board(self.store).post(_OVER)

    def cancel(self) -> None:
        """End the wait for other nodes; may be called from any thread."""
        self._is_cancelled = True

    def _host(self) -> object:
        """Open the store, and confirm to every other node that it has reached the store of this run."""
        store = PrefixStore(_PREFIX, self._open())
        board = _make_board(store)
        keys = {_arrival_key(node): node for node in range(1, self.num_nodes)}
        wait = StartWait(self.limit)

        def is_over(ids: Messages) -> bool:
            wait.tell(lambda: self._awaited([node for key, node in keys.items() if key not in ids]))
            return self._is_cancelled

        ids = board.wait_for(list(keys), self.limit.total_seconds(), until=is_over)
        if len(ids) < len(keys):
            raise self._missing([node for key, node in keys.items() if key not in ids])
        for attempt in ids.values():
            board.post(_confirmation_key(attempt))
        return store

    def _open(self) -> Any:
        try:
            # on one machine, any port: the previous one is still taken when workers restart
            store = host_store(self.address, self.port if self.num_nodes > 1 else 0)
        except OSError as error:
            raise ProcessError(
                f"Node 0 cannot listen on {self.address}:{self.port} ({error.strerror}); set MASTER_ADDR to an address "
                "of this machine and MASTER_PORT to a free port, the same on every node."
            ) from error
        self.port = store.port
        return store

    def _join(self) -> object:
        """Connect to the store of node 0 until it confirms that it belongs to this run."""
        wait = StartWait(self.limit)
        missing = [0]
        while (left := wait.left()) > 0 and not self._is_cancelled:
            limit = timedelta(seconds=min(left, _ATTEMPT))
            try:
                connection = connect_store(self.address, self.port, limit)
                store = PrefixStore(_PREFIX, connection)
                board = _make_board(store)
                if self._is_confirmed(board):
                    return store
                missing = [node for node in range(1, self.num_nodes) if not board.has(_arrival_key(node))]
            except RuntimeError:  # not there yet, or just gone
                pass
            wait.tell(lambda: self._awaited(missing or [0]))  # noqa: B023
            time.sleep(_PAUSE)
        raise self._missing(missing or [0])

    def _is_confirmed(self, board: Noticeboard) -> bool:
        """Return whether node 0 confirms this arrival; the store may belong to an earlier run of the same program."""
        if board.has(_OVER):
            return False
        attempt = uuid.uuid4().hex
        board.post(_arrival_key(self.node_rank), attempt)
        return bool(board.wait_for([_confirmation_key(attempt)], _ATTEMPT, until=lambda _: self._is_cancelled))

    def _awaited(self, nodes: list[int]) -> str:
        address = f"{self.address}:{self.port}{unknown_host(self.address)}"
        return f"node {', '.join(map(str, nodes))} of {self.num_nodes} to connect to {address}"

    def _missing(self, nodes: list[int]) -> ProcessError:
        return ProcessError(
            f"Node {', '.join(map(str, nodes))} of {self.num_nodes} did not connect to {self.address}:{self.port} "
            f"within {self.limit.total_seconds():g} s (this is node {self.node_rank}); start the program there too, "
            "with its own NODE_RANK and the same MASTER_ADDR and MASTER_PORT, or raise start_timeout."
        )

    def get_backend(self) -> str:
        """Return the name to show in elastic's logs."""
        return "echelon"

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use this store; otherwise rank 0 would open a port on every interface."""
        return True

    def is_closed(self) -> bool:
        """Return False: the same nodes may meet again."""
        return False

    def set_closed(self) -> None:
        """Do nothing: no other node could join."""

    def num_nodes_waiting(self) -> int:
        """Return 0: the number of nodes is fixed."""
        return 0

    def get_run_id(self) -> str:
        """Return the same id for every run, as each run has its own store."""
        return "echelon"

    def shutdown(self) -> bool:
        """Do nothing: the store closes with its last reference."""
        return True


def _make_board(store: Store) -> Noticeboard:
    return Noticeboard(store, "rendezvous")


def _arrival_key(node: int) -> str:
    return f"arrival/{node}"


def _confirmation_key(attempt: str) -> str:
    return f"confirmation/{attempt}"
