"""ReplicaGuard: an error or a warning if parameters that ranks hold in common are no longer equal."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

from ...common.errors import ModuleError
from ...strategies.placed.placed import Placed

if TYPE_CHECKING:
    from ...strategies.parallel.replica_check import ReplicaDifference

Action = Literal["error", "warn"]

_CAUSE: Final = (
    "Each rank has changed it by itself, from numbers that only it has, such as its samples, its seed or its time"
)
_OR_A_BUFFER: Final = "; or keep it in a buffer (self.register_buffer) that is reduced over the ranks"


class ReplicaGuard:
    """Compares replicas before and after the first step, at the end of each epoch, and whenever they are synchronized.

    Nothing else reads all parameters at these points often enough to be noticed; a step costs nothing.

    Args:
        placed: the module, which knows what its ranks hold in common.
        step: returns the number of optimizer steps so far.
        action: what to do about the first difference.
        choice: how to choose the other action, for the error.
    """

    def __init__(self, placed: Placed, step: Callable[[], int], action: Action, choice: str = "") -> None:
        self._placed, self._step, self._action, self._choice = placed, step, action, choice
        self.next_step = math.inf
        """The step after which to compare: the first; infinity afterwards."""
        self._equal_at: int | None = None
        self._has_warned = False

    def begin(self) -> None:
        """Compare replicas as training begins, after hooks that may change them. Collective: every rank calls it."""
        if self._placed.ranks.world_size > 1:
            # later, steps may have written other buffers on each rank
            self._judge(self._placed.sync_replicas(only_compares=True, with_buffers=True))
            self.next_step = self._step() + 1

    def sync(self) -> None:
        """Make replicas equal, as far as they are not by design, and compare them. Collective: every rank calls it."""
        self._judge(self._placed.sync_replicas())

    def check(self) -> None:
        """Compare replicas as they are. Collective: every rank calls it."""
        self.next_step = math.inf
        self._judge(self._placed.sync_replicas(only_compares=True))

    def _judge(self, difference: ReplicaDifference | None) -> None:
        if difference is None:
            self._equal_at = self._step()
            return
        since = "" if self._equal_at is None else f"; at global_step {self._equal_at} they were still equal"
        message = (
            f"Replicas differ after global_step {self._step()}: {difference}{since}. {_CAUSE}; use what all have: "
            "reduce it (self.trainer.strategy.all_reduce), or send one rank's (strategy.broadcast)"
            f"{_OR_A_BUFFER if difference.kind == 'frozen parameter' else ''}."
        )
        if self._action == "error":
            raise ModuleError(f"{message}{self._choice}")
        if not self._has_warned and self._placed.ranks.rank == 0:
            warnings.warn(message, stacklevel=2)
        self._has_warned = True
