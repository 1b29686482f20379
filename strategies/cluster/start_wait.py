"""Wait for other processes at the start: it says now and then what it waits for, and how long it may still take."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

_FIRST: Final = 10.0
"""Seconds until the first message."""
_EVERY: Final = 30.0
"""Seconds between two messages."""

_log = logging.getLogger(__name__)


class StartWait:
    """A wait that has just begun.

    Args:
        limit: how long it may last, the user's `start_timeout`.
        is_told: whether this process tells the user about it.
    """

    def __init__(self, limit: timedelta, *, is_told: bool = True) -> None:
        now = time.monotonic()
        self._limit, self._end = limit.total_seconds(), now + limit.total_seconds()
        self._due = now + _FIRST
        self._is_told = is_told

    def left(self) -> float:
        """Return the seconds until its end, at least 0."""
        return max(0.0, self._end - time.monotonic())

    def until_due(self) -> float:
        """Return the seconds until the next message or the end, at least 1 ms."""
        return max(1e-3, min(self._end, self._due) - time.monotonic())

    def tell(self, what: Callable[[], str]) -> None:
        """Say what is waited for, if it is time and there is something."""
        if time.monotonic() < self._due or not self.left():
            return
        self._due = time.monotonic() + _EVERY
        if self._is_told and (missing := what()):
            _log.warning(
                "Waiting for %s; giving up in %.0f s (start_timeout is %g s).", missing, self.left(), self._limit
            )

    @contextmanager
    def telling(self, what: Callable[[], str]) -> Iterator[None]:
        """Say it from a thread, beside a call that cannot be cut into pieces."""
        is_over = threading.Event()

        def run() -> None:
            while self.left() and not is_over.wait(self.until_due()):
                self.tell(what)

        threading.Thread(target=run, name="echelon-start-wait", daemon=True).start()
        try:
            yield
        finally:
            is_over.set()


def unknown_host(address: str) -> str:
    """Return a remark in brackets if no machine has this name; otherwise nothing."""
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        return f" ({error.strerror or error}: set MASTER_ADDR to a name or an address of the first machine)"
    return ""
