"""What a forked program starts: its fork server and its store are also forks, as interpreters would import torch."""

from __future__ import annotations

import fcntl
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from echelon.strategies.launch import forkserver_preload

MARK = "ECHELON_TEST_MARK"
"""The variable by which tests find the processes that they started."""

_COMMAND = "from multiprocessing.forkserver import main"
_STORE = "import os\nif os.fork():"
"""How the program begins that becomes the store of a rendezvous."""
_ABOVE = 512  # descriptors from here on are unused
_MAX = 16  # the most descriptors that multiprocessing passes on


def fork_in_advance() -> None:
    """Fork a process that becomes this one's fork server once multiprocessing starts one; call it from the only thread.

    Until then it waits. It gets what a new interpreter would: the command, the environment, descriptors, and the
    signals that are blocked at that moment. It ends with this process.
    """
    ask, spawn = _waiting(), util.spawnv_passfds

    def ask_or_spawn(path: Any, words: Sequence[Any], descriptors: Sequence[int]) -> int:
        pid = ask(str(words[-1]), descriptors) if str(words[-1]).startswith(_COMMAND) else None
        return spawn(path, words, descriptors) if pid is None else pid

    util.spawnv_passfds = ask_or_spawn


def fork_store_in_advance() -> None:
    """Fork a process that becomes the store of a rendezvous, should this one start it; as in `fork_in_advance`."""
    ask, run = _waiting(is_apart=True), subprocess.run

    def ask_or_run(words: Any, **options: Any) -> Any:
        pid = ask(str(words[-1]), options["pass_fds"]) if str(words[-1]).startswith(_STORE) else None
        if pid is None:
            return run(words, **options)
        done = subprocess.CompletedProcess(words, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        done.check_returncode()
        return done

    subprocess.run = ask_or_run


def _waiting(*, is_apart: bool = False) -> Callable[[str, Sequence[int]], int | None]:
    """Fork a process that waits; return what has it run code and returns its id, but None after the first time.

    With `is_apart`, it runs in a session of its own, without streams.
    """
    ours, its = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become(its, is_apart=is_apart)
    its.close()

    def ask(code: str, descriptors: Sequence[int]) -> int | None:
        if ours.fileno() < 0:
            return None
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        message = pickle.dumps((code, dict(os.environ), set(blocked), list(descriptors)))
        socket.send_fds(ours, [message], list(descriptors))
        ours.shutdown(socket.SHUT_WR)  # closing it would not do: another process that waits has it as well
        ours.close()
        return pid

    return ask


def _become(channel: socket.socket, *, is_apart: bool) -> NoReturn:
    # a signal to the whole group is for the program; the command comes with the signals to block
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
    try:
        message, received, _, _ = socket.recv_fds(channel, 1 << 16, _MAX)
        while part := channel.recv(1 << 16):
            message += part
        if message:
            if is_apart:
                os.setsid()
                nothing = os.open(os.devnull, os.O_RDWR)
                for stream in range(3):
                    os.dup2(nothing, stream)
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
