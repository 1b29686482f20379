"""Store of the rendezvous, in a process of its own, so that it outlives every agent."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any, Final

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as its documentation has it

from ..cluster.network import is_this_machine
from ..cluster.tcp_store import listen
from ..errors import ConfigError, ProcessError

LIFE: Final = "echelon/life"
"""Counts the keep-alive messages of the agents, one a second each."""
CLOSED: Final = "echelon/closed"
"""Set once a run has ended."""
KEPT: Final = "echelon/kept"
"""Set if the store serves run after run, until it is terminated."""
CLOCK: Final = "echelon/clock"
"""The time on the machine of the store."""

_IDLE: Final = 60.0  # seconds without keep-alive messages after which the store ends
_LINGER: Final = 3.0  # the same, once a run has ended
_LOOK: Final = 0.25
_TRY: Final = timedelta(seconds=10)  # a process that was just started has to import torch
_SILENCE: Final = 10  # seconds after which a machine that does not answer counts as gone
_SKEW: Final = 1.5  # seconds; a node that is silent for 3 s by the clocks of the others counts as dead
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
    """Connect to the store; start it first if nobody has and `host` names this machine.

    Raises:
        ProcessError: if there is no store within `limit`.
    """
    end = time.monotonic() + limit.total_seconds()
    is_to_start = is_this_machine(host)
    while True:
        is_to_start = is_to_start and not _start(host, port)
        try:
            # torch warns of each attempt that fails
            socket.create_connection((host, port), timeout=min(_TRY, limit).total_seconds()).close()
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_TRY)
        except (OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
            if time.monotonic() > end:
                raise ProcessError(
                    f"There is no store for the rendezvous at {host}:{port} after start_timeout="
                    f"{limit.total_seconds():g} s ({error}); start the program on the machine with that address, or "
                    f"`echelon rendezvous --listen {host}:{port}` there, and let nodes reach that port."
                ) from error
        else:
            _hang_up_on_silence(port)
            return store
        time.sleep(_LOOK)


def check_clock(store: Any) -> None:
    """Compare the clocks of this machine and of the store's.

    Raises:
        ConfigError: if they differ so much that nodes would count each other as dead.
    """
    end = time.monotonic() + _TRY.total_seconds()
    while store.check([CLOCK]):  # otherwise it is another program's store
        skew = time.time() - float(store.get(CLOCK))
        if abs(skew) < _SKEW:
            return
        if time.monotonic() > end:
            raise ConfigError(
                f"The clock of this machine must agree with that of the rendezvous, got a difference of {skew:+.1f} s; "
                "set the clocks by NTP: nodes tell by them who is alive."
            )
        time.sleep(_LOOK)  # a process that is short of processor time updates its clock late


def _start(address: str, port: int) -> bool:
    """Start the store's process, unless somebody listens there already; return whether it was started.

    The socket listens before the process runs: of several agents that start at once one gets it, and the calls of the
    others wait until the store answers.
    """
    try:
        listener = listen(address, port)
    except OSError:  # the port is taken, by the store or another program
        return False
    with listener:
        file = listener.fileno()
        program = _PROGRAM.format(path=sys.path, module=__name__, address=address, port=port, file=file)
        subprocess.run(
            [sys.executable, "-c", program],
            pass_fds=[file],
            stdin=subprocess.DEVNULL,
            # otherwise a reader of the agent's output would wait for this process, too
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
    life, last = 0, time.monotonic()
    while is_kept or time.monotonic() - last < (_LINGER if store.check([CLOSED]) else _IDLE):
        store.set(CLOCK, str(time.time()))
        time.sleep(_LOOK)
        before, life = life, store.add(LIFE, 0)
        if life != before:
            last = time.monotonic()


def _hang_up_on_silence(port: int) -> None:
    """Let the kernel close connections to a machine that has vanished; the store's client would wait forever."""
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed already
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    _hang_up(connection, port)


def _hang_up(connection: socket.socket, port: int) -> None:
    if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == port:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE)
