"""Dynamic rendezvous of torch, with shorter waits, and with a check of its state before it is unpickled.

The private names of torch's rendezvous stand here; torch 2.11.0, 2.14.1 and 2.15.0 have them.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    _Action,
    _DistributedRendezvousOpExecutor,
    _RendezvousContext,
    _RendezvousJoinOp,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _BackendRendezvousStateHolder as StateHolder
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc as Node
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousExitOp as Exit

__all__ = ["Exit", "Node", "QuickSteps", "StateHolder", "check_state", "set_time_of", "shift_times", "takes_part"]

_LOOK: Final = 0.05  # seconds between two looks; each costs 0.3 ms
_BETWEEN: Final = 0.5  # seconds within which a node that has left the last round is queued for the next one

_TORCH: Final = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_KNOWN: Final = frozenset(
    (
        (_TORCH, "_RendezvousState"),
        (_TORCH, "_NodeDesc"),
        ("datetime", "datetime"),
        ("datetime", "timedelta"),
        ("datetime", "timezone"),
    )
)


class QuickSteps(_DistributedRendezvousOpExecutor):
    """Takes the steps that torch's operations decide on, and ends a rendezvous once no node is missing.

    At every rendezvous, torch makes a sufficient number of nodes wait for more (last_call). But only at the first one
    is it unknown which nodes will join. Later ones are joined by the nodes of the last round, the last of which opens
    the next one, and by those in the queue: once it is empty, all are there except those that have left or died.
    """

    def __init__(self, node: Node, holder: StateHolder, settings: RendezvousSettings) -> None:
        super().__init__(node, holder, settings)
        self._expected: frozenset[Node] = frozenset()
        self._since: float | None = None

    def note_round(self) -> None:
        """Expect the nodes of the current round at the next one."""
        self._expected = frozenset(self._state_holder.state.participants)

    def num_missing(self) -> int:
        """Return how many nodes of the current round had left it at the last look; this one too, if others went on."""
        return len(self._expected - self._state_holder.state.participants.keys())

    def run(
        self,
        state_handler: Callable[[_RendezvousContext, float], _Action],
        deadline: float,
        update_deadline: Any = None,
    ) -> None:
        """Take steps until the operation is done.

        Raises:
            RendezvousError: if it cannot be done.
        """

        def decide(context: _RendezvousContext, deadline: float) -> _Action:
            action = state_handler(context, deadline)
            while action == _Action.SYNC:
                if isinstance(state_handler, _RendezvousJoinOp) and self._all_are_there(context):
                    return _Action.MARK_RENDEZVOUS_COMPLETE
                time.sleep(_LOOK)
                self._state_holder.sync()
                self._state = self._state_holder.state
                context = _RendezvousContext(context.node, self._state, context.settings)
                action = state_handler(context, deadline)
            return action

        super().run(decide, deadline, update_deadline)

    def _record(self, *_: object, **__: object) -> None:
        """Do nothing: torch would search the whole stack and all modules for a name, many times per second."""

    def _all_are_there(self, context: _RendezvousContext) -> bool:
        state = context.state
        is_open = not state.complete and context.node in state.participants
        is_enough = len(state.participants) >= context.settings.min_nodes
        if not self._expected or not is_open or not is_enough or state.wait_list:
            self._since = None
            return False
        self._since = time.monotonic() if self._since is None else self._since
        return self._expected <= state.participants.keys() or time.monotonic() - self._since > _BETWEEN


def check_state(data: bytes) -> None:
    """Check a rendezvous' pickled state before torch unpickles it, as anyone with access to the store can write it.

    Raises:
        RendezvousStateError: if it holds anything that torch does not put there.
    """
    try:
        _StateUnpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise RendezvousStateError(str(error)) from error


def shift_times(data: bytes, seconds: float) -> bytes:
    """Return a rendezvous' pickled state, which must have been checked, with all its times shifted by some seconds."""
    state = pickle.loads(data)  # noqa: S301 - `check_state` has looked at it
    by = timedelta(seconds=seconds)
    state.last_heartbeats = {node: heard + by for node, heard in state.last_heartbeats.items()}
    state.deadline = state.deadline and state.deadline + by
    return pickle.dumps(state)


def set_time_of(node: Node, data: bytes, seconds: float) -> bytes:
    """Return a rendezvous' pickled state, which must have been checked, with a new time for when a node was heard."""
    state = pickle.loads(data)  # noqa: S301 - `check_state` has looked at it
    if node in state.last_heartbeats:
        state.last_heartbeats[node] = datetime.fromtimestamp(seconds, UTC)
    return pickle.dumps(state)


def takes_part(node: Node, data: bytes) -> bool:
    """Return whether a node takes part in a round, given a rendezvous' pickled state that this process has written."""
    return node in pickle.loads(data).participants  # noqa: S301 - it is this process's own


class _StateUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it holds {module}.{name}")
        return super().find_class(module, name)
