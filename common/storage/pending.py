"""Pending: the upload of a checkpoint that is under way, and how much of it the store has."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from ..units import in_units


@dataclass
class Pending:
    """An upload by this process; it is pending until all ranks' are complete and the manifest is in the store.

    Args:
        path: the URL of the checkpoint.
        size: the bytes that this process sends of it, about.
    """

    path: str
    size: int
    step: int = 0
    """The `global_step` that it holds."""
    sent: int = 0
    """The bytes that the store has confirmed."""
    is_over: bool = False
    """Whether it is complete, or has failed."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, size: int) -> None:
        """Count bytes that the store has confirmed; called by the threads that send."""
        with self._lock:
            self.sent = min(self.size, self.sent + size)

    @property
    def left(self) -> int:
        """The bytes that are still to be sent."""
        return self.size - self.sent

    def __str__(self) -> str:
        share = self.sent / self.size if self.size else 1.0
        return f"step {self.step}, {share:.0%} of {in_units(self.size)}"
