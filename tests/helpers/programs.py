"""Python programs that tests run, each in its own process, which is forked because importing torch takes seconds."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any

from forked_server import MARK, fork_in_advance, fork_store_in_advance, show

from echelon.strategies.launch.fork_server import blank_main, preload_modules

_PLAIN: dict[str, Any] = {}
"""The state of the fork server of programs, and the process that has started it."""
_TESTS = str(Path(__file__).parents[1])


def run_program(
    *words: str | Path, folder: Path, timeout: float = 440.0, environ: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run ``python *words`` in a folder, as `subprocess.run` would, but with torch and Echelon imported already.

    `words` are a script, ``-m`` and a module, or ``-c`` and code, optionally after ``-W error``; then arguments.
    """
    with tempfile.TemporaryDirectory() as place:
        output, errors = Path(place, "output"), Path(place, "errors")
        program = ForkedProgram(words, folder=folder, environ=environ, output=output, errors=errors)
        try:
            code = program.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
            raise subprocess.TimeoutExpired(words, timeout, output.read_text(), errors.read_text()) from None
        return subprocess.CompletedProcess(words, code, output.read_text(), errors.read_text())


class ForkedProgram:
    """``python *words`` in a folder, as in `run_program`; like a `subprocess.Popen` that writes to files.

    Args:
        words: the arguments of ``python``.
        folder: the working directory.
        environ: the environment, which may contain `MARK`.
        output: the file for standard output.
        errors: the file for standard error; by default the same.
        namespace: the network namespace to run in; by default this one.
    """

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        folder: Path,
        environ: Mapping[str, str],
        output: Path,
        errors: Path | None = None,
        namespace: str | None = None,
    ) -> None:
        self.args = words
        path = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        path += [entry for entry in sys.path if not entry.startswith(_TESTS)]
        streams = (Path(os.devnull), output, errors or output)
        program = _Program([str(word) for word in words], folder, dict(environ), path, streams, namespace)
        with _plain_server(), blank_main():
            self._process = multiprocessing.get_context("forkserver").Process(target=program.run)
            self._process.start()
        self.pid: int = self._process.pid  # type: ignore[assignment]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code.

        Raises:
            subprocess.TimeoutExpired: if there is none within `timeout` seconds.
        """
        if self.returncode is None:
            self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the program has ended."""
        self.send_signal(signal.SIGKILL)


class WatchedProgram(ForkedProgram):
    """A forked program whose output is read while it runs, as through the pipes of a `subprocess.Popen`.

    Args:
        words: the arguments of ``python``.
        folder: the working directory.
        environ: the environment.
    """

    def __init__(self, words: Sequence[str | Path], *, folder: Path, environ: Mapping[str, str] = os.environ) -> None:
        self._place = tempfile.TemporaryDirectory()
        files = [Path(self._place.name, name) for name in ("output", "errors")]
        for file in files:
            file.touch()
        self._files = [file.open() for file in files]
        super().__init__(words, folder=folder, environ=environ, output=files[0], errors=files[1])

    def readline(self) -> str:
        """Return the next line of standard output once it is complete, or the rest once the program has ended."""
        line, has_ended = "", False
        while not line.endswith("\n"):
            has_ended = self.poll() is not None
            line += self._files[0].readline()
            if has_ended:
                break
            time.sleep(0.01)
        return line

    def communicate(self, timeout: float = 400.0) -> tuple[str, str]:
        """Wait for the end; return the unread standard output, and all of standard error.

        Raises:
            subprocess.TimeoutExpired: if it does not end within `timeout` seconds.
        """
        self.wait(timeout)
        output, errors = (file.read() for file in self._files)
        self.close()
        return output, errors

    def close(self) -> None:
        """Kill the program if it is running, and remove its files."""
        self.kill()
        self.wait()
        for file in self._files:
            file.close()
        self._place.cleanup()


@contextlib.contextmanager
def _plain_server() -> Iterator[None]:
    """Have multiprocessing use another fork server inside the block, which has imported nothing for tests.

    A program would see it, and what it logs: transformers, say, makes torchao log two lines to standard error as soon
    as something asks transformers for a name. The server of this process's own ranks, which have use for that, stays.
    """
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    of_ranks = _state(server)
    if _PLAIN.get("process") != os.getpid():  # after a fork, it is another's
        _PLAIN.update(process=os.getpid(), state=_state(forkserver.ForkServer()))
    vars(server).update(_PLAIN["state"])
    try:
        preload_modules(())
        yield
    finally:
        _PLAIN["state"] = _state(server)
        vars(server).update(of_ranks)


def _state(server: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(server).items() if name != "_lock"}


@dataclass(frozen=True)
class _Program:
    """The program that a forked process becomes; it gets nothing else from the test."""

    words: list[str]
    folder: Path
    environ: dict[str, str]
    path: list[str]
    streams: tuple[Path, ...]
    namespace: str | None

    def run(self) -> None:
        """Run as the program."""
        self._take_over()
        words = self.words
        if words[0] == "-W":
            sys.warnoptions.append(words[1])  # inherited by processes that it starts
            warnings.simplefilter(words[1])  # type: ignore[arg-type]
            words = words[2:]
        fork_in_advance()
        if MARK in self.environ:  # a node
            fork_store_in_advance()
        show([sys.executable, *self.words], self.environ, MARK)  # only here: the other, which waits, gets no mark
        try:
            if words[0] == "-m":
                sys.argv, sys.path[:] = words[1:], ["", *self.path]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                self._execute(words)
        finally:  # an interpreter does this at exit, unlike a multiprocessing process
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()

    def _take_over(self) -> None:
        """Set up the session, streams, folder and environment as for a newly started program."""
        os.setsid()
        for number, file in enumerate(self.streams):
            opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            os.dup2(opened, number)
            os.close(opened)
        if self.namespace is not None:
            _enter(self.namespace)
        multiprocessing.set_start_method(None, force=True)  # this process has inherited the fork server's
        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environ)
        sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in self.environ
        tempfile.tempdir = None  # the environment names another, perhaps
        multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]

    def _execute(self, words: list[str]) -> None:
        main = sys.modules["__main__"] = ModuleType("__main__")
        if words[0] == "-c":
            source, name, sys.argv, place = words[1], "<string>", ["-c", *words[2:]], ""
        else:
            source, name, sys.argv, place = Path(words[0]).read_text(), words[0], words, str(Path(words[0]).parent)
            vars(main)["__file__"] = name
        sys.path[:] = [place, *self.path]
        exec(compile(source, name, "exec"), vars(main))  # noqa: S102 - a program of ours


def _enter(namespace: str) -> None:
    """Move this process to a network namespace made with `ip netns`."""
    import ctypes  # os.setns() exists only from Python 3.12 on

    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")
