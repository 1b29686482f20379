"""Output to the user: the kind of console, and lines printed above a progress bar."""

from __future__ import annotations

import sys
import threading
from importlib.util import find_spec
from typing import Any, Final, Literal

Console = Literal["terminal", "notebook", "plain_notebook", "file"]

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
    text = _encodable(text, sys.stdout.encoding or "utf-8")
    if "tqdm" not in sys.modules:
        print(text, flush=True)
        return
    from tqdm import tqdm

    lock_threads_only(tqdm)
    tqdm.write(text)


def lock_threads_only(bar: Any) -> None:
    """Give a tqdm class a lock for threads only, unless it has a lock: only rank 0 draws.

    The default also locks processes, with a named semaphore that leaks when the process is killed.
    """
    if not hasattr(bar, "_lock"):
        bar.set_lock(threading.RLock())


def _encodable(text: str, encoding: str) -> str:
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
