"""The store where nodes meet, in a process of its own: an agent that dies takes it from nobody."""

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
"""Counts the signs of life of the agents, of which each gives one a second."""
CLOSED: Final = "echelon/closed"
"""Is there once a run has ended."""
KEPT: Final = "echelon/kept"
"""Is there if the store serves run after run, until somebody ends it."""
CLOCK: Final = "echelon/clock"
"""The time of day where the store is."""

_IDLE: Final = 60.0  # seconds without a sign of life after which nobody comes back, as a scheduler might have it
_LINGER: Final = 3.0  # the same, once a run has ended
_LOOK: Final = 0.25
_TRY: Final = timedelta(seconds=10)  # the process that was just started has to import torch
_SILENCE: Final = 10  # seconds after which a machine that answers nothing is gone
_SKEW: Final = 1.5  # seconds; a node that was not heard of for 3 is dead, by the clocks of the others
_PROGRAM: Final = """\
import os
if os.fork():
    os._exit(0)  # so that the agent has no child of which it would have to hear
import sys
sys.path[:] = {path!r}
from {module} import serve
serve({address!r}, {port}, {file})
"""


def reach_store(host: str, port: int, limit: timedelta) -> Any:
    """Connect to the store, which is started here if nobody has, and this is the machine that `host` names.

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
                    f"There is no store at {host}:{port} where nodes could meet, after start_timeout="
                    f"{limit.total_seconds():g} s ({error}); start the program on the machine with that address, or "
                    f"`echelon rendezvous --listen {host}:{port}` there, and let nodes reach that port."
                ) from error
        else:
            _hang_up_on_silence(port)
            return store
        time.sleep(_LOOK)


def check_clock(store: Any) -> None:
    """Compare this machine's clock with that of the store's.

    Raises:
        ConfigError: if they differ by so much that nodes would take each other for dead.
    """
    end = time.monotonic() + _TRY.total_seconds()
    while store.check([CLOCK]):  # else it is another program's
        skew = time.time() - float(store.get(CLOCK))
        if abs(skew) < _SKEW:
            return
        if time.monotonic() > end:
            raise ConfigError(
                f"The clock of this machine is {skew:+.1f} s from that of the rendezvous; nodes tell by their clocks "
                "who is alive: set them by NTP."
            )
        time.sleep(_LOOK)  # a process that gets no time to run tells it late


def _start(address: str, port: int) -> bool:
    """Start the store's process, unless somebody listens there already; return whether it was started.

    The socket listens before the process runs: of several agents that start at once one has it, and the others' calls
    wait until the store answers.
    """
    try:
        listener = listen(address, port)
    except OSError:  # taken: by the store, as will be seen
        return False
    with listener:
        file = listener.fileno()
        program = _PROGRAM.format(path=sys.path, module=__name__, address=address, port=port, file=file)
        subprocess.run(
            [sys.executable, "-c", program],
            pass_fds=[file],
            stdin=subprocess.DEVNULL,
            # else who reads the agent's output to its end would wait for this process, too
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the agent
            check=True,
        )
    return True


def serve(address: str, port: int, file: int, *, is_kept: bool = False) -> None:
    """Keep the store that listens at a file; for ever, or until no agent has given a sign of life for a while."""
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
    """Have the kernel end connections to a machine that has vanished, where a store's client would wait for ever."""
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            if stat.S_ISSOCK(os.stat(int(name)).st_mode):
                with socket.socket(fileno=os.dup(int(name))) as one:
                    _hang_up(one, port)


def _hang_up(one: socket.socket, port: int) -> None:
    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] == port:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 2)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE)
