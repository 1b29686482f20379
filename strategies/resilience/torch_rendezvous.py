"""The steps of torch's rendezvous without its pauses: of a second at each look, and for nodes that nobody expects."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    _Action,
    _BackendRendezvousStateHolder,
    _DistributedRendezvousOpExecutor,
    _NodeDesc,
    _RendezvousContext,
    _RendezvousJoinOp,
)

_LOOK: Final = 0.05  # seconds; a look costs 0.3 ms
_BETWEEN: Final = 0.5  # seconds in which a node that has left the last round is in the queue for the next one


class QuickSteps(_DistributedRendezvousOpExecutor):
    """Takes the steps that torch's operations decide on, and ends a meeting for which nobody is missing.

    torch has nodes that are enough wait for others (last_call) each time they meet. At the first meeting nobody knows
    who comes. Later, those of the last round come, the last of them opening the next one, and those in the queue: once
    it is empty, all are there but who has left, or is dead.
    """

    def __init__(self, node: _NodeDesc, holder: _BackendRendezvousStateHolder, settings: RendezvousSettings) -> None:
        super().__init__(node, holder, settings)
        self._expected: frozenset[_NodeDesc] = frozenset()
        self._since: float | None = None

    def note_round(self) -> None:
        """Expect those of the round that stands now at the next one."""
        self._expected = frozenset(self._state_holder.state.participants)

    def run(
        self,
        state_handler: Callable[[_RendezvousContext, float], _Action],
        deadline: float,
        update_deadline: Any = None,
    ) -> None:
        """Take steps until the operation is done.

        Raises:
            RendezvousError: if it cannot be.
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

    def _record(self, *_: Any, **__: Any) -> None:
        """Do nothing: torch would look through the whole stack and all modules for a name, many times a second."""

    def _all_are_there(self, context: _RendezvousContext) -> bool:
        state = context.state
        is_open = not state.complete and context.node in state.participants
        is_enough = len(state.participants) >= context.settings.min_nodes
        if not self._expected or not is_open or not is_enough or state.wait_list:
            self._since = None
            return False
        self._since = time.monotonic() if self._since is None else self._since
        return self._expected <= state.participants.keys() or time.monotonic() - self._since > _BETWEEN
