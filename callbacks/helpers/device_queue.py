"""DeviceQueue: the steps that a GPU was given and has not completed, limited to a few."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import torch

from ...strategies.devices.streams import recorded_event

_DEPTH: Final = 3
"""Steps by which the host may be ahead: enough to keep a GPU busy, few enough to notice soon if it stops."""


class DeviceQueue:
    """Follows a device that runs behind the host, with an event after each step.

    Without it, the host queues steps until the device's queue is full, a thousand kernels later: a device that hangs
    looks alive until then, and one that works through a long queue looks dead.
    """

    def __init__(self, device: torch.device, completed: int) -> None:
        self._device = device
        self.completed = completed
        """The newest step that the device is known to have completed."""
        self._given: deque[tuple[int, Any]] = deque()

    def give(self, step: int) -> None:
        """Note that the current device was given the last work of a step; wait if it is too far behind."""
        event = recorded_event(self._device, blocking=True)
        self._given.append((step, event))
        if len(self._given) > _DEPTH:
            self._given[0][1].synchronize()
        while self._given and self._given[0][1].query():
            self.completed = self._given.popleft()[0]
