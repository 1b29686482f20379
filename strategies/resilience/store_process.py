"""Store of the rendezvous, in a separate process, so that it outlives every agent."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as its documentation has it

from ...common.errors import ProcessError
from ..cluster.network import is_this_machine
from ..cluster.start_wait import StartWait
from ..cluster.tcp_store import connect_store, connections_to, listen_on_address

LIFE: Final = "echelon/life"
"""Counts the keep-alive messages of the agents, each of which sends one per second."""
CLOSED: Final = "echelon/closed"
"""Set once a run has ended."""
KEPT: Final = "echelon/kept"
"""Set if the store serves one run after another, until it is terminated."""
CLOCK: Final = "echelon/clock"
"""Milliseconds for which the store has been running: the clock with which nodes decide who is alive. Unlike the time of
day it never jumps, and it stands still while the store does."""

_IDLE: Final = 60.0  # seconds on that clock without keep-alive messages after which the store ends
_LINGER: Final = 3.0  # the same, once a run has ended
_LOOK: Final = 0.25
_TRY: Final = timedelta(seconds=10)  # a process that was just started has to import torch
_SILENCE: Final = 10  # seconds after which a machine that does not answer counts as gone
_PROGRAM: Final = """\
import os
if os.fork():
    os._exit(0)  # so that the store is not a child of the agent
import sys
sys.path[:] = {path!r}
from {module} import serve
serve({address!r}, {port}, {file})
"""


def reach_store(host: str, port: int, limit: timedelta) -> Any:
    """Connect to the store, after starting it if it is not running and `host` is this machine.

    Raises:
        ProcessError: if there is no store within `limit`.
    """
    wait = StartWait(limit)
    is_to_start = is_this_machine(host)
    while True:
        is_to_start = is_to_start and not _start_store(host, port)
        try:
            attempt = min(_TRY, limit)
            socket.create_connection((host, port), timeout=attempt.total_seconds()).close()  # torch warns of failures
            store = connect_store(host, port, attempt)
            store.set_timeout(_TRY)
        except (OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
            if not wait.left():
                raise ProcessError(
                    f"There is no store for the rendezvous at {host}:{port} after "
                    f"start_timeout={limit.total_seconds():g} s ({error}); start the program on the machine with that "
                    f"address, or `echelon rendezvous --listen {host}:{port}` there, and make sure that nodes can "
                    "reach that port."
                ) from error
        else:
            hang_up_on_silence(port)
            return store
        wait.tell(lambda: f"the store of the rendezvous at {host}:{port}")
        time.sleep(_LOOK)


def hang_up_on_silence(port: int) -> None:
    """Let the kernel end connections to a store that is gone or hangs; otherwise its clients would wait forever."""
    for connection in connections_to(port):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _SILENCE, 0))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE)


def _start_store(address: str, port: int) -> bool:
    """Start the store's process, unless something listens there already; return whether it was started.

    The socket listens before the process runs: if several agents start at once, one of them gets it, and the others'
    calls wait until the store answers.
    """
    try:
        listener = listen_on_address(address, port)
    except OSError:  # the port is taken, by the store or another program
        return False
    with listener:
        file = listener.fileno()
        program = _PROGRAM.format(path=sys.path, module=__name__, address=address, port=port, file=file)
        subprocess.run(
            [sys.executable, "-c", program],
            pass_fds=[file],
            stdin=subprocess.DEVNULL,
            # otherwise a reader of the agent's output would also wait for this process
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the agent
            check=True,
        )
    return True


def serve(address: str, port: int, file: int, *, is_kept: bool = False) -> None:
    """Serve the store on an open socket, forever or until agents send no more keep-alive messages."""
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=file)
    if is_kept:
        store.set(KEPT, "")
    idle, life, now = 0.0, 0, time.monotonic()
    while is_kept or idle < (_LINGER if store.check([CLOSED]) else _IDLE):
        before, now = now, time.monotonic()
        passed = min(now - before, 2 * _LOOK)  # not the time for which this process stood still
        store.add(CLOCK, 1 + round(1000 * passed))
        time.sleep(_LOOK)
        known, life = life, store.add(LIFE, 0)
        idle = idle + passed if life == known else 0.0
