"""Where the agents of an elastic run meet, again and again: alone on one machine, or by torch's c10d rendezvous."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Final

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
    Token,
    _RendezvousExitOp,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ..environment import DEFAULT_PORT, LOOPBACK, Environment
from ..errors import ConfigError, ProcessError
from ..network import address_towards
from ..rendezvous import Rendezvous, listen
from .shared_store import SharedStore
from .store_process import CLOSED, LIFE, open_store

_KEEP_ALIVE: Final = 1  # seconds between two signs of life of an agent
_MISSED: Final = 3  # as many after which it is dead


def meeting(
    *,
    nodes: tuple[int, int],
    endpoint: str | None,
    run_id: str,
    start_timeout: timedelta,
    last_call: timedelta = timedelta(seconds=3),
) -> OneNode | ManyNodes:
    """Return where this node meets the others of its run.

    Args:
        nodes: how few and how many nodes may take part; more than that stand by until one leaves.
        endpoint: "HOST[:PORT]" of the store by which they meet; None for one node.
        run_id: what tells runs on one store from each other.
        start_timeout: how long a node waits for the store, and then for others.
        last_call: how long those that are enough wait for more.

    Raises:
        ConfigError: for an endpoint that is none, or leads nowhere.
        ProcessError: if there is no store.
    """
    if nodes == (1, 1):
        return OneNode(start_timeout)
    if endpoint is None:
        raise ConfigError(f"nodes={nodes[0]}:{nodes[1]} need an endpoint to meet at; give HOST:PORT of one of them.")
    try:
        host, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        address = address_towards(host)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The endpoint {endpoint!r} leads nowhere ({error}); give HOST:PORT of a node that all reach."
        ) from error
    # else MASTER_PORT would be that of the first round for ever, whoever has left since (torch 2.14)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return ManyNodes.open(
        host,
        port,
        address,
        nodes=nodes,
        run_id=run_id,
        timeout=RendezvousTimeout(join=start_timeout, last_call=last_call),
    )


class OneNode(Rendezvous):
    """The meetings of a node with itself; each round has a store of its own, on loopback."""

    def __init__(self, limit: timedelta) -> None:
        super().__init__(Environment("none", 0, 0, 0, 1, 1, 1, LOOPBACK, None), limit)
        listener = listen(LOOPBACK, 0)
        port = listener.getsockname()[1]
        store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        self.shared: Any = PrefixStore("echelon", store)
        """Outlives rounds."""
        self.shared_at = SharedStore(LOOPBACK, port, "echelon")

    def num_nodes_lost(self) -> int:
        """Return 0: this one is here."""
        return 0

    def leave(self) -> None:
        """Do nothing; nobody is left behind."""

    def release(self) -> None:
        """Let go of the stores, and with them of their ports."""
        self.store = self.shared = None


class ManyNodes(DynamicRendezvousHandler):
    """The meetings of a changing number of nodes: torch's, with errors that say what to do, and a way to leave."""

    endpoint: str
    address: str
    """Of this node, for the others."""
    shared: Any
    """The agents' own store, under the run's id; it outlives rounds."""
    shared_at: SharedStore
    node_rank: int
    num_nodes: int
    """Of the last meeting, as is the rank."""
    link: Link

    @classmethod
    def open(
        cls,
        host: str,
        port: int,
        address: str,
        *,
        nodes: tuple[int, int],
        run_id: str,
        timeout: RendezvousTimeout,
    ) -> ManyNodes:
        """Connect to the store, starting it where nobody has and this node is its host."""
        # one connection for each use: a call that waits, for a key or an answer, holds up all others on its connection
        state, rounds, shared = (open_store(host, port, timeout.join) for _ in range(3))
        link = Link(state, run_id)
        handler = cls.from_backend(
            run_id,
            rounds,
            link,
            *nodes,
            address,
            timeout,
            keep_alive_interval=_KEEP_ALIVE,
            keep_alive_max_attempt=_MISSED,
        )
        assert isinstance(handler, ManyNodes)
        handler.endpoint, handler.address, handler.link = f"{host}:{port}", address, link
        handler.shared_at = SharedStore(host, port, f"echelon/{run_id}")
        handler.shared = PrefixStore(handler.shared_at.prefix, shared)
        handler.node_rank, handler.num_nodes = 0, 0
        return handler

    def next_rendezvous(self) -> RendezvousInfo:
        """Leave the round, if there is one, and meet for the next.

        Raises:
            ProcessError: if the store is gone, the run is over, or too few nodes came in time.
            RendezvousGracefulExitError: if the run ended while this node stood by.
        """
        self.link.is_waited_for = True
        try:
            info = super().next_rendezvous()
        except RendezvousClosedError as error:
            raise ProcessError(
                f"The run {self.get_run_id()!r} that met at {self.endpoint} is over; give another one another id."
            ) from error
        except RendezvousTimeoutError as error:
            raise self._too_few() from error
        except (RendezvousConnectionError, RendezvousStateError) as error:
            raise self._lost(error) from error
        finally:
            self.link.is_waited_for = False
        self.node_rank, self.num_nodes = info.rank, info.world_size
        return info

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wait for the next round: new ones, or those whose workers failed.

        Raises:
            ProcessError: if the store is gone.
        """
        try:
            return super().num_nodes_waiting()
        except RendezvousError as error:
            raise self._lost(error) from error

    def num_nodes_lost(self) -> int:
        """Return how many nodes of this round have left it, or given no sign of life.

        Raises:
            ProcessError: if the store is gone.
        """
        self.num_nodes_waiting()  # looks at the store
        return self.num_nodes - len(self._state_holder.state.participants)

    def leave(self) -> None:
        """Leave the run for good; the others see it at once, and need not wait until this node counts as dead."""
        self._stop_heartbeats()
        try:
            self._op_executor.run(_RendezvousExitOp(), self._get_deadline(self._settings.timeout.close))
        except RendezvousError as error:
            raise self._lost(error) from error

    def cancel(self) -> None:
        """End the wait for other nodes, and all later ones; from any thread."""
        self.link.is_cancelled = True

    def release(self) -> None:
        """Let go of the connections to the store."""
        self.shared = None

    def shutdown(self) -> bool:
        """End the run for all nodes."""
        is_closed: bool = super().shutdown()
        if is_closed:
            self.link.tell_of_end()
        return is_closed

    def _too_few(self) -> ProcessError:
        came = len(self._state_holder.state.participants) + 1  # this one has left again
        least, limit = self.settings.min_nodes, self.settings.timeout.join.total_seconds()
        return ProcessError(
            f"{came} of at least {least} nodes came to {self.endpoint} within start_timeout={limit:g} s; start the "
            f"program on {least - came} more with the same endpoint and run id {self.get_run_id()!r}, or wait longer."
        )

    def _lost(self, error: RendezvousError) -> ProcessError:
        if self.link.is_cancelled:
            return ProcessError(f"The wait for other nodes at {self.endpoint} was ended; start the program again.")
        return ProcessError(
            f"The store at {self.endpoint} does not answer any more ({error.__cause__ or error}), and without it nodes "
            "cannot meet; start the run again, with `echelon rendezvous` on a machine that stays."
        )


class Link(C10dRendezvousBackend):
    """The state of the rendezvous in the store, and a sign of life with each word to it."""

    def __init__(self, store: Any, run_id: str) -> None:
        super().__init__(store, run_id)
        self.store = store
        self.is_cancelled = self.is_waited_for = False

    def get_state(self) -> tuple[bytes, Token] | None:
        self._check()
        return super().get_state()

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        self._check()
        self._call_store("add", LIFE, 1)
        return super().set_state(state, token)

    def tell_of_end(self) -> None:
        """Let the store's process know that a run has ended."""
        self._call_store("set", CLOSED, "")

    def _check(self) -> None:
        if self.is_cancelled and self.is_waited_for:
            raise RendezvousConnectionError("cancelled")
