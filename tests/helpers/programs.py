"""Python programs that tests run: each in a process of its own, which is forked, as importing torch takes seconds."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

from echelon.strategies.launch.agent import blank_main, preload

_TESTS = str(Path(__file__).parents[1])


def run_program(
    *words: str | Path, folder: Path, timeout: float = 110.0, environ: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run ``python *words`` in a folder, as `subprocess.run` would, but with torch and Echelon imported before.

    `words` are a script, or ``-c`` and code, perhaps after ``-W error``; and arguments.
    """
    preload(())
    with tempfile.TemporaryDirectory() as place:
        output, errors = Path(place, "output"), Path(place, "errors")
        path = [entry for entry in sys.path if not entry.startswith(_TESTS)]
        with blank_main():
            process = multiprocessing.get_context("forkserver").Process(
                target=_become, args=([str(word) for word in words], folder, dict(environ), path, output, errors)
            )
            process.start()
        process.join(timeout)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            raise subprocess.TimeoutExpired(words, timeout, output.read_text(), errors.read_text())
        code = process.exitcode
        process.close()
        return subprocess.CompletedProcess(words, code, output.read_text(), errors.read_text())


def _become(
    words: list[str], folder: Path, environ: dict[str, str], path: list[str], output: Path, errors: Path
) -> None:
    """Be the program: in the forked process, which has nothing of the test's but what is passed."""
    os.setsid()
    for number, file in enumerate((Path(os.devnull), output, errors)):
        opened = os.open(file, os.O_RDWR | os.O_CREAT)
        os.dup2(opened, number)
        os.close(opened)
    multiprocessing.set_start_method(None, force=True)  # that of this process is the fork server's
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    sys.dont_write_bytecode = "PYTHONDONTWRITEBYTECODE" in environ
    if words[0] == "-W":
        sys.warnoptions.append(words[1])  # which processes that it starts inherit
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2:]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if words[0] == "-c":
        source, name, sys.argv, place = words[1], "<string>", ["-c", *words[2:]], ""
    else:
        source, name, sys.argv, place = Path(words[0]).read_text(), words[0], words, str(Path(words[0]).parent)
        vars(main)["__file__"] = name
    sys.path[:] = [place, *path]
    try:
        exec(compile(source, name, "exec"), vars(main))  # noqa: S102 - a program of ours
    finally:  # what an interpreter does at its end, and a process of multiprocessing does not
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
