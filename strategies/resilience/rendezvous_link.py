"""The state of the rendezvous of an elastic run's agents, in the store through which they meet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token

from ..torch_internals.rendezvous import Node, check_state, set_time_of, shift_times, takes_part
from .store_process import CLOCK, LIFE

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

KEEP_ALIVE: Final = timedelta(seconds=1)
"""The time between two keep-alive messages of an agent."""
MISSED: Final = 3
"""The consecutive keep-alive messages that a node misses before it counts as dead."""
_LIFE: Final = MISSED * KEEP_ALIVE.total_seconds()


class Link(C10dRendezvousBackend):
    """The state of the rendezvous in the store; each write counts as a sign of life of this agent.

    torch compares the times at which nodes were last heard from with this node's time of day, which may be wrong, and
    may jump. In the store, these times are on the store's clock.
    """

    _loss: BaseException | None = None
    """The error with which the store was lost."""

    def __init__(self, node: Node, store: Store, run_id: str) -> None:
        super().__init__(store, run_id)
        self.store = store
        self._node = node
        self._ahead = 0.0  # seconds by which this node's time of day was ahead of the store's clock when last read
        self.is_cancelled = self.is_waited_for = False
        self.counts_until = -math.inf  # the time at which this node counts as dead, on the monotonic clock
        self.allow_until: Callable[[float], None] | None = None

    def _call_store(self, store_op: str, *args: object, **kwargs: object) -> Any:
        if self._loss is not None:  # an answer that arrived now would belong to an earlier request
            raise RendezvousConnectionError("The store is lost") from self._loss
        try:
            return super()._call_store(store_op, *args, **kwargs)
        except RendezvousConnectionError as error:
            self._loss = error.__cause__
            raise

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state with times on this clock, and what `set_state` needs to replace it; None if new."""
        self._check()
        state_and_token = super().get_state()
        self._ahead = time.time() - self._clock()
        if state_and_token is None:
            return None
        state, token = state_and_token
        return self._by_day(state), token

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Write the state unless another node was faster; return what is there then, and whether it was written."""
        self._check()
        now = time.monotonic()
        self._call_store("add", LIFE, 1)
        # shifted back by as much as when they were read: the time of day may have jumped in between
        state = shift_times(state, -self._ahead)
        result = super().set_state(set_time_of(self._node, state, self._clock()), token)
        if result is None:
            return None
        written, new_token, has_set = result
        if has_set and takes_part(self._node, written):
            self.counts_until = now + _LIFE
            if self.allow_until is not None:
                self.allow_until(self.counts_until)
        self._ahead = time.time() - self._clock()
        return self._by_day(written), new_token, has_set

    def _by_day(self, state: bytes) -> bytes:
        check_state(state)
        return shift_times(state, self._ahead)

    def _clock(self) -> float:
        """Return the time on the store's clock, in seconds, or on this node's if the store does not have one yet."""
        return self._call_store("add", CLOCK, 0) / 1000 or time.time() - self._ahead

    def _check(self) -> None:
        if self.is_cancelled and self.is_waited_for:
            raise RendezvousConnectionError("cancelled")
