"""Signal handlers of a run, removed at its end and in every process that is forked meanwhile."""

from __future__ import annotations

import functools
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

RUN_SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Signals with which users and schedulers ask a run to end cleanly."""

ECHO: Final = 1.0
"""Seconds within which a repeated signal is ignored."""


@contextmanager
def handling_signals(handle: Callable[[int], None]) -> Iterator[None]:
    """Handle the signals of a run inside the block; does nothing outside the main thread, as Python requires.

    Ignored signals stay ignored: SIGINT under nohup, and in a worker, to which the caller forwards its signals. The
    same signal within `ECHO` is not handled again: ``timeout`` sends it to the program and then to its process group,
    and schedulers that signal every process also signal the one that forwards it to the others.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _undo_in_forks()
    handled_at: dict[int, float] = {}

    def handle_once(number: int) -> None:
        now = time.monotonic()
        if now - handled_at.get(number, -math.inf) > ECHO:
            handled_at[number] = now
            handle(number)

    handlers = [
        _Handler(number, handle_once)
        for number in RUN_SIGNALS
        if signal.getsignal(number) not in (signal.SIG_IGN, _do_nothing)
    ]
    try:
        yield
    finally:
        for handler in handlers:
            handler.undo()


def end_handling() -> None:
    """Restore the handlers from before the run, so that a signal ends it at once, with nothing saved."""
    if threading.current_thread() is threading.main_thread():
        _undo_all()


def ignore_signal(number: int) -> None:
    """Ignore a signal in this process and its forks, but not in the programs that they start.

    With SIG_IGN these would ignore it, too, although many rely on it to end, such as a profiler on SIGINT.
    """
    signal.signal(number, _do_nothing)
    signal.siginterrupt(number, False)


def _do_nothing(number: int, frame: object) -> None:
    pass


@contextmanager
def sheltering_forks() -> Iterator[None]:
    """Shield processes that are started inside the block from Ctrl-C, which reaches all processes of a terminal.

    DataLoader workers need this, since the run finishes its step after Ctrl-C. They inherit the blocked signal; this
    process receives it after the block.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Handler:
    """A handler of one signal, and the handler that it replaces."""

    def __init__(self, number: int, handle: Callable[[int], None]) -> None:
        self._number, self._handle, self._process = number, handle, os.getpid()
        self._before: Any = signal.getsignal(number)
        signal.signal(number, self)

    def __call__(self, number: int, frame: object) -> None:
        if os.getpid() == self._process:
            self._handle(number)
        else:  # just forked, and not removed yet
            self.undo()
            signal.raise_signal(number)

    def undo(self) -> None:
        """Restore the previous handler, or the default if it was not set from Python."""
        signal.signal(self._number, self._before if self._before is not None else signal.SIG_DFL)


def _undo_all() -> None:
    for number in RUN_SIGNALS:
        while isinstance(handler := signal.getsignal(number), _Handler):
            handler.undo()


@functools.cache
def _undo_in_forks() -> None:
    """Make forked processes remove the handlers: a Pool's must end on SIGTERM. Cached: fork hooks cannot be removed.

    Signals are blocked around the fork. One that reaches the new process right away, such as that of
    Process.terminate(), then waits until the previous handlers are back; otherwise Python would lose it.
    """
    if not hasattr(os, "register_at_fork"):  # Windows does not fork
        return
    masks = threading.local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, RUN_SIGNALS)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def undo() -> None:
        _undo_all()
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=undo)
