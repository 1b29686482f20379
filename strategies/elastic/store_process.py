"""The store where nodes meet, in a process of its own: an agent that dies takes it from nobody."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any, Final

from torch.distributed import TCPStore

from ..errors import ProcessError
from ..network import is_this_machine
from ..rendezvous import listen

LIFE: Final = "echelon/life"
"""Counts the signs of life of the agents, of which each gives one a second."""
CLOSED: Final = "echelon/closed"
"""Is there once a run has ended."""
KEPT: Final = "echelon/kept"
"""Is there if the store serves until somebody ends it, run after run."""

_IDLE: Final = 60.0  # seconds without a sign of life after which nobody comes back, as a scheduler might have it
_LINGER: Final = 3.0  # the same, once a run has ended
_LOOK: Final = 0.25
_TRY: Final = timedelta(seconds=10)  # the process that was just started has to import torch
_PROGRAM: Final = """\
import os
if os.fork():
    os._exit(0)  # so that the agent has no child of which it would have to hear
from {module} import serve
serve({address!r}, {port}, {file})
"""


def open_store(host: str, port: int, limit: timedelta) -> Any:
    """Connect to the store, which is started here if nobody has, and this is the machine that `host` names.

    Raises:
        ProcessError: if there is no store within `limit`.
    """
    end = time.monotonic() + limit.total_seconds()
    is_here = is_this_machine(host)
    while True:
        if is_here:
            _start(host, port)
        try:
            # a store that is not there yet would have torch write warnings, again and again
            socket.create_connection((host, port), timeout=_TRY.total_seconds()).close()
            return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_TRY)
        except (OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
            if time.monotonic() > end:
                raise ProcessError(
                    f"There is no store at {host}:{port} where nodes could meet, after start_timeout="
                    f"{limit.total_seconds():g} s ({error}); start the program on the machine with that address, or "
                    f"`echelon rendezvous --listen {host}:{port}` there, and let nodes reach that port."
                ) from error
        time.sleep(_LOOK)


def _start(address: str, port: int) -> None:
    """Start the store's process, unless somebody listens there already.

    The socket listens before the process runs: of several agents that start at once one has it, and the others' calls
    wait until the store answers.
    """
    try:
        listener = listen(address, port)
    except OSError:  # taken: by the store, as will be seen
        return
    with listener:
        file = listener.fileno()
        program = _PROGRAM.format(module=__name__, address=address, port=port, file=file)
        subprocess.run(
            [sys.executable, "-c", program],
            pass_fds=[file],
            stdin=subprocess.DEVNULL,
            # else who reads the agent's output to its end would wait for this process, too
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the agent
            check=True,
        )


def serve(address: str, port: int, file: int) -> None:
    """Keep the store until no agent has given a sign of life for a while."""
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=file)
    life, last = 0, time.monotonic()
    while time.monotonic() - last < (_LINGER if store.check([CLOSED]) else _IDLE):
        time.sleep(_LOOK)
        before, life = life, store.add(LIFE, 0)
        if life != before:
            last = time.monotonic()
