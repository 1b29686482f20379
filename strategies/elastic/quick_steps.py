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


class QuickSteps(_DistributedRendezvousOpExecutor):
    """Takes the steps that torch's operations decide on, and ends a meeting for which nobody is missing.

    torch has nodes that are enough wait for others (last_call) each time they meet. At the first meeting nobody knows
    who comes. Later all who were there come from the last round, the last of them opening the next one: once nobody
    waits to be let in, all are there.
    """

    def __init__(self, node: _NodeDesc, holder: _BackendRendezvousStateHolder, settings: RendezvousSettings) -> None:
        super().__init__(node, holder, settings)
        self.has_met = False
        """Whether this node has taken part in a round."""

    def run(
        self,
        state_handler: Callable[[_RendezvousContext, float], _Action],
        deadline: float,
        update_deadline: Any = None,
    ) -> None:
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

    def _all_are_there(self, context: _RendezvousContext) -> bool:
        state = context.state
        is_open = not state.complete and context.node in state.participants
        is_enough = len(state.participants) >= context.settings.min_nodes
        return self.has_met and is_open and is_enough and not state.wait_list
