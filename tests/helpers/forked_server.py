"""The fork server of a forked program: also a fork, since a new interpreter would import torch again."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from echelon.strategies.launch import forkserver_preload

MARK = "echelonTEST_MARK"
"""The variable by which tests find the processes that they started."""

_COMMAND = "from multiprocessing.forkserver import main"
_ABOVE = 512  # descriptors from here on are unused
_MAX = 16  # the most descriptors that multiprocessing passes on


def fork_in_advance() -> None:
    """Fork a process that becomes this one's fork server once multiprocessing starts one; call it from the only thread.

    Until then it waits. It gets what a new interpreter would: the command, the environment, descriptors, and the
    signals that are blocked at that moment. It ends with this process.
    """
    ours, its = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_the_fork_server(its)
    its.close()
    spawn = util.spawnv_passfds

    def ask_or_spawn(path: Any, words: Sequence[Any], descriptors: Sequence[int]) -> int:
        if ours.fileno() < 0 or not str(words[-1]).startswith(_COMMAND):
            return spawn(path, words, descriptors)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        message = pickle.dumps((words[-1], dict(os.environ), set(blocked), list(descriptors)))
        socket.send_fds(ours, [message], list(descriptors))
        ours.close()
        return pid

    util.spawnv_passfds = ask_or_spawn


def _become_the_fork_server(channel: socket.socket) -> NoReturn:
    # a signal to the whole group is for the program; the command comes with the signals to block
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    try:
        message, received, _, _ = socket.recv_fds(channel, 1 << 16, _MAX)
        while part := channel.recv(1 << 16):
            message += part
        if message:
            _serve(*pickle.loads(message), received)
    except BaseException:  # noqa: BLE001 - there is no caller to catch it
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _serve(command: str, environ: dict[str, str], blocked: set[int], numbers: list[int], received: list[int]) -> None:
    above = [fcntl.fcntl(number, fcntl.F_DUPFD, _ABOVE) for number in received]
    os.closerange(3, _ABOVE)
    for number, descriptor in zip(numbers, above, strict=True):
        os.dup2(descriptor, number, inheritable=False)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environ)
    show([sys.executable, "-c", command], environ, MARK)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    del sys.modules[forkserver_preload.__name__]  # to be imported again, with the modules that the environment names
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        exec(command, {})  # noqa: S102 - multiprocessing's own
    except SystemExit:  # there is no client left
        return


def show(words: Sequence[str], environ: Mapping[str, str], first: str = "") -> None:
    """Overwrite the command line and environment that /proc shows for this process, as far as there is room.

    Args:
        words: the command line.
        environ: the environment.
        first: the variable to write first, so that there is room for it.
    """
    import ctypes  # here, since a fork server does not import it

    names = sorted(environ, key=lambda name: name != first)
    blocks = list(words), [f"{name}={environ[name]}" for name in names]
    places = list(map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]))
    for block, begin, end in zip(blocks, places[::2], places[1::2], strict=True):
        text = b"".join(os.fsencode(entry) + b"\0" for entry in block)
        ctypes.memmove(begin, text[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)
