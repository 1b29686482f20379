"""DeviceQueue: the steps that a GPU has been given and has not completed, of which there are only a few."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import torch

_DEPTH: Final = 3
"""Steps by which the host may be ahead: enough to keep a GPU busy, few enough to notice soon that it has stopped."""


class DeviceQueue:
    """Follows a device that runs behind the host, by an event after each step.

    Without it a host hands out steps until the device's queue is full, a thousand kernels later: a device that hangs
    looks alive until then, and one that works through a long queue looks dead.
    """

    def __init__(self, completed: int) -> None:
        self.completed = completed
        """The newest step that the device has completed, as far as was seen."""
        self._given: deque[tuple[int, Any]] = deque()

    def give(self, step: int) -> None:
        """Note that the current device has been given the last work of a step; wait if it is too far behind."""
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._given.append((step, event))
        if len(self._given) > _DEPTH:
            self._given[0][1].synchronize()
        while self._given and self._given[0][1].query():
            self.completed = self._given.popleft()[0]
