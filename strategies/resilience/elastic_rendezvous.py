"""Where the agents of an elastic run meet, again and again: alone on one machine, or by torch's c10d rendezvous."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import time
from datetime import timedelta
from typing import Any, Final

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore  # type: ignore[attr-defined]  # as its documentation has it
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    Token,
    _BackendRendezvousStateHolder,
    _RendezvousExitOp,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ..cluster.environment import DEFAULT_PORT, LOOPBACK, Environment, set_defaults
from ..cluster.network import address_towards
from ..cluster.tcp_store import host_store
from ..errors import ConfigError, ProcessError, RunError
from ..launch.static_rendezvous import Rendezvous
from .known_state import check_state
from .shared_store import SharedStore
from .store_process import CLOSED, KEPT, LIFE, check_clock, reach_store
from .torch_rendezvous import QuickSteps

_KEEP_ALIVE: Final = timedelta(seconds=1)  # between two signs of life of an agent
_MISSED: Final = 3  # as many after which it is dead
_AFTER_A_RUN: Final = 30.0  # seconds in which the store of the run before has gone
_OVER: Final = "over"

_log = logging.getLogger("echelon")


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
        last_call: how long those that are enough wait for more, at their first meeting.

    Raises:
        ConfigError: for an endpoint that is none, or leads nowhere, or for clocks that differ.
        ProcessError: if there is no store, or a run of this id is over.
    """
    if nodes == (1, 1):
        return OneNode(start_timeout)
    if endpoint is None:
        raise ConfigError(f"nodes={nodes[0]}:{nodes[1]} need an endpoint to meet at; give HOST:PORT of one of them.")
    host, port = _place(endpoint)
    # else MASTER_PORT would be that of the first round for ever, whoever has left since (torch 2.14)
    set_defaults({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    shared_at = SharedStore(host, port, f"echelon/{run_id}")
    _await_end_of_last_run(shared_at, start_timeout)
    timeout = RendezvousTimeout(join=start_timeout, last_call=last_call)
    return ManyNodes(shared_at, RendezvousSettings(run_id, *nodes, timeout, _KEEP_ALIVE, _MISSED))


def _place(endpoint: str) -> tuple[str, int]:
    try:
        host, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        address = ipaddress.ip_address(address_towards(host))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The endpoint {endpoint!r} leads nowhere ({error}); give HOST:PORT of a node that all reach."
        ) from error
    if address.is_loopback and host not in ("localhost", str(address)):
        raise ConfigError(
            f"The endpoint's name {host!r} stands for {address} on this machine, where no other node could reach it; "
            "give its address instead."
        )
    return host, port


def _await_end_of_last_run(place: SharedStore, limit: timedelta) -> None:
    """Wait for the store of a run before this one to end, as it does soon after its last node has left.

    Raises:
        ProcessError: if a run of this id is over, and the store stays.
    """
    end = time.monotonic() + _AFTER_A_RUN
    while True:
        store = reach_store(place.host, place.port, limit)
        check_clock(store)
        if not store.check([f"{place.prefix}/{_OVER}"]):
            return
        if time.monotonic() > end or store.check([KEPT]):
            raise _over(place)
        del store  # its end would be an error for who is connected
        time.sleep(1.0)


def _over(place: SharedStore) -> ProcessError:
    run_id = place.prefix.removeprefix("echelon/")
    return ProcessError(
        f"The run {run_id!r} that met at {place.host}:{place.port} is over; give the next one another run id."
    )


class SpareError(RunError):
    """A run that ended while this node stood by."""


class OneNode(Rendezvous):
    """The meetings of a node with itself; each round has a store of its own, on loopback."""

    def __init__(self, limit: timedelta) -> None:
        super().__init__(Environment("none", 0, 0, 0, 1, 1, 1, LOOPBACK, None), limit)
        store = host_store(LOOPBACK, 0)
        self.shared: Any = PrefixStore("echelon", store)
        """Outlives rounds."""
        self.shared_at = SharedStore(LOOPBACK, store.port, "echelon")

    def num_nodes_lost(self) -> int:
        """Return 0: this one is here."""
        return 0

    def leave(self) -> None:
        """Do nothing; nobody is left behind."""

    def release(self) -> None:
        """Let go of the stores, and with them of their ports."""
        self.store = self.shared = None


class ManyNodes(DynamicRendezvousHandler):
    """The meetings of a changing number of nodes: torch's, with errors that say what to do, and a way to leave.

    Ranks of nodes go by their addresses, each time anew: a node that has just come may be the first.
    """

    def __init__(self, shared_at: SharedStore, settings: RendezvousSettings) -> None:
        host, port, limit = shared_at.host, shared_at.port, settings.timeout.join
        # a connection for each use: a call that waits, for a key or an answer, holds up all others on its connection
        state, rounds, shared = (reach_store(host, port, limit) for _ in range(3))
        self.address = address_towards(host)
        """Of this node, for the others."""
        self.shared_at = shared_at
        self.shared: Any = PrefixStore(shared_at.prefix, shared)
        """The store of the run's agents; it outlives rounds."""
        self.node_rank = self.num_nodes = 0
        """Of the last meeting."""
        node = self._node_desc_generator.generate(self.address)
        self._link = _Link(state, settings.run_id)
        holder = _BackendRendezvousStateHolder(self._link, settings, cache_duration=0)
        super().__init__(node, settings, "c10d", rounds, holder)
        self._op_executor = self._steps = QuickSteps(node, holder, settings)

    def next_rendezvous(self) -> RendezvousInfo:
        """Leave the round, if there is one, and meet for the next.

        Raises:
            ProcessError: if the store is gone, the run is over, or too few nodes came in time.
            SpareError: if the run ended while this node stood by.
        """
        self._link.is_waited_for = True
        try:
            info = self._meet()
        except RendezvousClosedError as error:
            raise _over(self.shared_at) from error
        except RendezvousGracefulExitError as error:
            most = self.settings.max_nodes
            raise SpareError(
                f"The run {self.get_run_id()!r} at {self._endpoint} ended while this node stood by, as {most} others "
                "took part; nothing is left to do here."
            ) from error
        except RendezvousTimeoutError as error:
            raise self._too_few() from error
        except (RendezvousConnectionError, RendezvousStateError) as error:
            raise self._lost(error) from error
        finally:
            self._link.is_waited_for = False
        self.node_rank, self.num_nodes = info.rank, info.world_size
        self._steps.note_round()
        return info

    def _meet(self) -> RendezvousInfo:
        while True:
            try:
                return super().next_rendezvous()
            except DistNetworkError as error:
                raise RendezvousConnectionError from error
            except DistStoreError:
                _log.info("A node was lost while all met; they meet again")
            except RendezvousTimeoutError:
                if len(self._state_holder.state.participants) < self.settings.min_nodes:
                    raise
                _log.info("This node goes on standing by: the run is going on without it")

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
        """Return how many nodes of this round have left it, or given no sign of life; 0 once the run is over.

        Then nodes leave as their workers end, and so may this one.

        Raises:
            ProcessError: if the store is gone.
        """
        self.num_nodes_waiting()  # looks at the store
        state = self._state_holder.state
        return 0 if state.closed else self.num_nodes - len(state.participants)

    def leave(self) -> None:
        """Leave the run for good; the others see it at once, and need not wait until this node counts as dead.

        Raises:
            ProcessError: if the store is gone.
        """
        self._stop_heartbeats()
        try:
            self._op_executor.run(_RendezvousExitOp(), self._get_deadline(self._settings.timeout.close))
        except RendezvousError as error:
            raise self._lost(error) from error

    def cancel(self) -> None:
        """End the wait for other nodes, and all later ones; from any thread."""
        self._link.is_cancelled = True

    def set_closed(self) -> None:
        """End the run for all nodes, and for those that come too late."""
        super().set_closed()
        self._tell_of_end()

    def shutdown(self) -> bool:
        """End the run for all nodes, and give no more signs of life; return whether the store heard of it."""
        is_closed: bool = super().shutdown()
        if is_closed:
            self._tell_of_end()
        return is_closed

    def release(self) -> None:
        """Leave, if that has not been done, and let go of the store; whether or not it is still there."""
        with contextlib.suppress(ProcessError):
            self.leave()
        self.shared = None

    def _tell_of_end(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it all who could come
            self.shared.set(_OVER, "")
            self._link.store.set(CLOSED, "")

    def _record(self, *_: Any, **__: Any) -> None:
        """Do nothing, as `QuickSteps` does."""

    def _too_few(self) -> ProcessError:
        came = len(self._state_holder.state.participants) + 1  # this one has left again
        least, limit = self.settings.min_nodes, self.settings.timeout.join.total_seconds()
        return ProcessError(
            f"{came} of at least {least} nodes came to {self._endpoint} within start_timeout={limit:g} s; start the "
            f"program on {least - came} more with the same endpoint and run id {self.get_run_id()!r}, or wait longer."
        )

    def _lost(self, error: RendezvousError) -> ProcessError:
        if self._link.is_cancelled and self._link.is_waited_for:
            return ProcessError(f"The wait for other nodes at {self._endpoint} was ended; start the program again.")
        if isinstance(error, RendezvousStateError):
            return ProcessError(
                f"What lies in the store at {self._endpoint} is no state of a rendezvous ({error}) and was not loaded; "
                "find out who writes there, and let only nodes of the run reach that port."
            )
        return ProcessError(
            f"The store at {self._endpoint} does not answer any more ({error.__cause__ or error}), and without it "
            "nodes cannot meet; start the run again, with `echelon rendezvous` on a machine that stays."
        )

    @property
    def _endpoint(self) -> str:
        return f"{self.shared_at.host}:{self.shared_at.port}"


class _Link(C10dRendezvousBackend):
    """The state of the rendezvous in the store, and a sign of life with each word to it."""

    def __init__(self, store: Any, run_id: str) -> None:
        super().__init__(store, run_id)
        self.store = store
        self.is_cancelled = self.is_waited_for = False

    def get_state(self) -> tuple[bytes, Token] | None:
        self._check()
        found = super().get_state()
        if found is not None:
            check_state(found[0])
        return found

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        self._check()
        self._call_store("add", LIFE, 1)
        found = super().set_state(state, token)
        if found is not None:
            check_state(found[0])
        return found

    def _check(self) -> None:
        if self.is_cancelled and self.is_waited_for:
            raise RendezvousConnectionError("cancelled")
