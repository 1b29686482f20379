"""Elsewhere: a process in which the tests of this folder run, whose torch has the device, as that of its ranks has.

The process of the tests has none, since torch would take it for the accelerator of every other test.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


class Elsewhere:
    """A process that calls functions of test files.

    Args:
        log: the file for what it prints.
        path: folders in which its Python, and that of its ranks, finds more.
        variables: its environment, beside this process's.
    """

    def __init__(self, log: Path, path: list[Path], variables: dict[str, str]) -> None:
        ours, theirs = Pipe()
        folders = [str(folder) for folder in (*path, *(TESTS / name for name in ("device", "helpers", "equivalence")))]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"import elsewhere; elsewhere.serve({theirs.fileno()})"],
                env=environment,
                pass_fds=[theirs.fileno()],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        theirs.close()
        self._pipe, self._log = ours, log

    def call(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> Any:
        """Return what a function of a test file returns there.

        Raises:
            AssertionError: with its traceback, if it raises; also if it takes too long.
        """
        self._pipe.send((function.__module__, function.__qualname__, args))
        try:
            answered = self._pipe.poll(timeout)
            answer = pickle.loads(self._pipe.recv_bytes()) if answered else None
        except (EOFError, ConnectionResetError):
            answer = None
        if answer is None:
            self.close()
            raise AssertionError(f"no answer within {timeout:g} s, or it died; it printed:\n{self._tail()}")
        result, failure = answer
        assert failure is None, f"{failure}\nIt printed:\n{self._tail()}"
        return result

    def close(self) -> None:
        """End the process and those that it started."""
        self._pipe.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _tail(self) -> str:
        return self._log.read_text()[-6000:]


def serve(file: int) -> None:
    """Call functions until the tests have gone."""
    import torch  # noqa: F401 - shows at once what is wrong with the device

    pipe: Any = Connection(file)
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(importlib.import_module(module), name)(*args), None
        except BaseException:  # noqa: BLE001 - the test shows it
            answer = None, traceback.format_exc()
        pipe.send_bytes(pickle.dumps(answer))
