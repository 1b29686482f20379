"""Rendezvous of an elastic run's agents before each round: one node, or several with torch's c10d rendezvous."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from ...common.errors import ConfigError, ProcessError, RunError
from ..cluster.environment import DEFAULT_PORT, LOOPBACK, Environment, set_defaults
from ..cluster.network import address_towards
from ..cluster.start_wait import StartWait
from ..cluster.tcp_store import host_store
from ..distributed.noticeboard import Noticeboard
from ..launch.static_rendezvous import Rendezvous
from ..torch_internals.rendezvous import Exit, QuickSteps, StateHolder
from .rendezvous_link import KEEP_ALIVE, MISSED, Link
from .rounds import StoreAddress
from .store_process import CLOSED, KEPT, reach_store

_AFTER_A_RUN: Final = 30.0  # seconds within which the store of the previous run ends
_OVER: Final = "over"

_log = logging.getLogger("echelon")


def make_rendezvous(
    *,
    nodes: tuple[int, int],
    endpoint: str | None,
    run_id: str,
    start_timeout: timedelta,
    last_call: timedelta = timedelta(seconds=3),
) -> OneNode | ManyNodes:
    """Return the rendezvous at which this node meets the others of its run.

    Args:
        nodes: the minimum and maximum number of nodes that take part; further nodes stand by until one leaves.
        endpoint: "HOST[:PORT]" of the store through which nodes meet; None for a single node.
        run_id: distinguishes the runs that use the same store.
        start_timeout: how long a node waits for the store, and then for other nodes.
        last_call: how long to wait for more nodes once the minimum has joined, at the first rendezvous.

    Raises:
        ConfigError: if the endpoint is invalid or unreachable.
        ProcessError: if there is no store, or a run with this id is over.
    """
    if nodes == (1, 1):
        return OneNode(start_timeout)
    if endpoint is None:
        raise ConfigError(
            f"endpoint must be HOST:PORT for nodes={nodes[0]}:{nodes[1]}, got None; give the address of one of them."
        )
    host, port = _parse_endpoint(endpoint)
    # otherwise MASTER_PORT stays the first round's, even after its node has left (torch 2.14)
    set_defaults({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})
    address = StoreAddress(host, port, f"echelon/{run_id}")
    _await_end_of_last_run(address, start_timeout)
    timeout = RendezvousTimeout(join=start_timeout, last_call=last_call)
    return ManyNodes(address, RendezvousSettings(run_id, *nodes, timeout, KEEP_ALIVE, MISSED))


def _parse_endpoint(endpoint: str) -> tuple[str, int]:
    try:
        host, port = parse_rendezvous_endpoint(endpoint, DEFAULT_PORT)
        address = ipaddress.ip_address(address_towards(host))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The endpoint {endpoint!r} cannot be resolved ({error}); give HOST:PORT of a node that all others can "
            "reach."
        ) from error
    if address.is_loopback and host not in ("localhost", str(address)):
        raise ConfigError(
            f"The endpoint's name {host!r} resolves to {address} on this machine, which no other node can reach; give "
            "its address instead."
        )
    return host, port


def _await_end_of_last_run(address: StoreAddress, limit: timedelta) -> None:
    """Wait for the store of a previous run to end, which happens soon after the last node of that run has left.

    Raises:
        ProcessError: if a run with this id is over, and its store does not end.
    """
    end = time.monotonic() + _AFTER_A_RUN
    while True:
        store = reach_store(address.host, address.port, limit)
        if not Noticeboard(store, address.prefix).has(_OVER):
            return
        if time.monotonic() > end or store.check([KEPT]):
            raise _run_over_error(address)
        del store  # a client that is connected when it ends gets an error
        time.sleep(1.0)


def _run_over_error(address: StoreAddress) -> ProcessError:
    run_id = address.prefix.removeprefix("echelon/")
    return ProcessError(
        f"The run {run_id!r} at {address.host}:{address.port} is over; give the next run another run ID."
    )


def lost_store(address: StoreAddress, error: BaseException) -> ProcessError:
    """Return the error for a store that was reached before and is gone."""
    return ProcessError(
        f"The store at {address.host}:{address.port} no longer answers ({error}), and without it nodes cannot meet; "
        "start the run again, with `echelon rendezvous` on a machine that stays up."
    )


class SpareError(RunError):
    """The run ended while this node was standing by."""


class OneNode(Rendezvous):
    """The rendezvous of a run on one node; each round has its own store, on loopback."""

    def __init__(self, limit: timedelta) -> None:
        super().__init__(Environment("none", 0, 0, 0, 1, 1, 1, LOOPBACK, None), limit)
        store = host_store(LOOPBACK, 0)
        self.notices: Any = Noticeboard(store, "echelon")
        """Messages that outlive rounds."""
        self.notices_at = StoreAddress(LOOPBACK, store.port, "echelon")

    def num_nodes_lost(self) -> int:
        """Return 0: there is no other node."""
        return 0

    def tell_while_heard(self, allow_until: Callable[[float], None]) -> None:
        """Do nothing: no other node goes on without this one."""

    def is_over(self) -> bool:
        """Return False: no other node can end the run."""
        return False

    def leave(self) -> None:
        """Do nothing: there is no other node."""

    def release(self) -> None:
        """Close the stores, and so free their ports."""
        self.store = None
        self.notices = None


class ManyNodes(DynamicRendezvousHandler):
    """The rendezvous of a varying number of nodes: torch's, with errors that say what to do, and a way to leave.

    At each rendezvous, nodes are ranked by their addresses: a node that has just joined may be the first.
    """

    def __init__(self, address: StoreAddress, settings: RendezvousSettings) -> None:
        host, port, limit = address.host, address.port, settings.timeout.join
        # one connection each: a call that waits for a key or an answer blocks all others on the same connection
        state, rounds, notices = (reach_store(host, port, limit) for _ in range(3))
        self.address = address_towards(host)
        """The address of this node, for the others."""
        self.notices_at = address
        self.notices: Any = Noticeboard(notices, address.prefix)
        """Messages between the run's agents and workers, which outlive rounds."""
        self.node_rank = self.num_nodes = 0
        """As of the last rendezvous."""
        node = self._node_desc_generator.generate(self.address)
        self._link = Link(node, state, settings.run_id)
        holder = StateHolder(self._link, settings, cache_duration=0)
        super().__init__(node, settings, "c10d", rounds, holder)
        self._op_executor = self._steps = QuickSteps(node, holder, settings)

    def next_rendezvous(self) -> RendezvousInfo:
        """Leave the current round, if any, and meet for the next one.

        Raises:
            ProcessError: if the store is gone, the run is over, or too few nodes came in time.
            SpareError: if the run ended while this node was standing by.
        """
        self._link.is_waited_for = True
        try:
            with StartWait(self.settings.timeout.join).telling(self._missing):
                info = self._meet()
        except RendezvousClosedError as error:
            raise _run_over_error(self.notices_at) from error
        except RendezvousGracefulExitError as error:
            most = self.settings.max_nodes
            raise SpareError(
                f"The run {self.get_run_id()!r} at {self._endpoint} ended while this node was on standby, because "
                f"{most} others took part; nothing is left to do here."
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
                _log.info("A node was lost while the nodes met; they meet again")
            except RendezvousTimeoutError:
                if len(self._state_holder.state.participants) < self.settings.min_nodes:
                    raise
                _log.info("This node remains on standby: the run continues without it")

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that wait for the next round: new ones, and those whose workers failed.

        Raises:
            ProcessError: if the store is gone.
        """
        try:
            return super().num_nodes_waiting()
        except RendezvousError as error:
            raise self._lost(error) from error

    def num_nodes_lost(self) -> int:
        """Return the number of nodes of this round that have left or died; 0 once the run is over, when all leave.

        Raises:
            ProcessError: if the store is gone.
        """
        self.num_nodes_waiting()  # reads the store
        return 0 if self.is_over() else self._steps.num_missing()

    def tell_while_heard(self, allow_until: Callable[[float], None]) -> None:
        """Call a function at each sign of life of this node, with the time at which it counts as dead if none follows.

        The time is on the monotonic clock. Other nodes that consider this one dead go on without it.
        """
        self._link.allow_until = allow_until
        allow_until(self._link.counts_until)

    def is_over(self) -> bool:
        """Return whether a node had ended the run when the store was last read."""
        return bool(self._state_holder.state.closed)

    def leave(self) -> None:
        """Leave the run for good. The others notice at once, instead of waiting until this node counts as dead.

        Raises:
            ProcessError: if the store is gone.
        """
        self._stop_heartbeats()
        try:
            self._op_executor.run(Exit(), self._get_deadline(self._settings.timeout.close))
        except RendezvousError as error:
            raise self._lost(error) from error

    def cancel(self) -> None:
        """End the wait for other nodes, and all later waits; may be called from any thread."""
        self._link.is_cancelled = True

    def set_closed(self) -> None:
        """End the run for all nodes, including those that arrive too late."""
        super().set_closed()
        self._tell_of_end()

    def shutdown(self) -> bool:
        """End the run for all nodes, stop the keep-alive messages, and return whether the store was reached."""
        is_closed: bool = super().shutdown()
        if is_closed:
            self._tell_of_end()
        return is_closed

    def release(self) -> None:
        """Leave, if not done yet, and close the connection to the store, which may be gone already."""
        with contextlib.suppress(ProcessError):
            self.leave()
        self.notices = None

    def _tell_of_end(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, so no node can join
            self.notices.post(_OVER)
            self._link.store.set(CLOSED, "")

    def _record(self, *_: object, **__: object) -> None:
        """Do nothing, as `QuickSteps` does."""

    def _missing(self) -> str:
        """Return what this node waits for; nothing on standby, and while enough nodes are there."""
        state, least = self._state_holder.state, self.settings.min_nodes
        came = len({*state.participants, self._this_node})
        return f"{least - came} more of at least {least} nodes to connect to {self._endpoint}" if came < least else ""

    def _too_few(self) -> ProcessError:
        came = len(self._state_holder.state.participants) + 1  # plus this one, which has left again
        least, limit = self.settings.min_nodes, self.settings.timeout.join.total_seconds()
        return ProcessError(
            f"{came} of at least {least} nodes connected to {self._endpoint} within start_timeout={limit:g} s; start "
            f"the program on {least - came} more with the same endpoint and run ID {self.get_run_id()!r}, or raise "
            "start_timeout."
        )

    def _lost(self, error: RendezvousError) -> ProcessError:
        if self._link.is_cancelled and self._link.is_waited_for:
            return ProcessError(f"The wait for other nodes at {self._endpoint} was canceled; start the program again.")
        if isinstance(error, RendezvousStateError):
            return ProcessError(
                f"The store at {self._endpoint} holds something other than the state of a rendezvous ({error}), which "
                "was not loaded; let only nodes of the run reach that port, and find out what else writes to it."
            )
        return lost_store(self.notices_at, error.__cause__ or error)

    @property
    def _endpoint(self) -> str:
        return f"{self.notices_at.host}:{self.notices_at.port}"
