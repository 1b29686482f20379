"""Output to the user: the kind of console, and lines printed above a progress bar."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Final, Literal

from .internals.progress_bars import has_lock

Console = Literal["terminal", "notebook", "plain_notebook", "file"]

_log = logging.getLogger("echelon")

_BOX: Final = str.maketrans("┏┳┓┡╇┩└┴┘━─┃│…", "+++++++++--||.")


def current_console() -> Console:
    """Return the kind of standard output: ``plain_notebook`` has no ipywidgets, ``file`` may be a pipe."""
    if _is_notebook():
        return "notebook" if find_spec("ipywidgets") is not None else "plain_notebook"
    return "terminal" if sys.stdout is not None and sys.stdout.isatty() else "file"


def say(text: str) -> None:
    """Print to standard output, above a progress bar, without characters that it cannot show.

    Do nothing if there is no standard output, as with pythonw or if it was closed.
    """
    if sys.stdout is None:
        return
    with outlives_output_errors():
        text = _make_encodable(text, sys.stdout.encoding or "utf-8")
        if "tqdm" not in sys.modules:
            print(text, flush=True)
            return
        from tqdm import tqdm

        lock_threads_only(tqdm)
        tqdm.write(text)
        sys.stdout.flush()


@contextmanager
def outlives_output_errors() -> Iterator[None]:
    """Fall silent, with one message, if standard output cannot be written in the block: training goes on.

    The reader of a pipe, such as ``head``, has ended, the disk is full, or the terminal is gone.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:  # of something else
            raise
        fall_silent(error)


def fall_silent(error: BaseException) -> None:
    """Discard what is printed from now on, also what Python has yet to flush at its exit."""
    _log.warning("Standard output cannot be written (%s): nothing more is printed, and the run goes on.", error)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):  # not a file
        sys.stdout = None  # as with pythonw


def lock_threads_only(bar: Any) -> None:
    """Give a tqdm class a lock for threads only, unless it has a lock: only rank 0 draws.

    The default also locks processes, with a named semaphore that leaks when the process is killed.
    """
    if not has_lock(bar):
        bar.set_lock(threading.RLock())


def _make_encodable(text: str, encoding: str) -> str:
    """Return the text as it is or, if needed, with ASCII boxes, as for a pipe of a Windows console."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_BOX).encode(encoding, "replace").decode(encoding)
    return text


def _is_notebook() -> bool:
    """Return whether this is a Jupyter kernel; IPython in a terminal counts as a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config
