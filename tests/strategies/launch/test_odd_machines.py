"""Machines and shells as users have them: a launched fit works there, or says in one error what to change."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_program
from small import Regression, loader

from echelon import Trainer
from echelon.common.errors import ConfigError, ProcessError
from echelon.common.proc_status import look_at
from echelon.strategies.distributed.pickling import pack_into
from echelon.strategies.launch import fork_server
from echelon.strategies.servers import processes

LAUNCH = """
import tempfile
from echelon.testing import run_ranks
def rank():
    from echelon.strategies.cluster.launchers import detect_environment
    return detect_environment().rank
if __name__ == "__main__":
    print(run_ranks(rank, 2, timeout=240.0))
"""


def launched(folder: Path, **environ: str | None) -> subprocess.CompletedProcess[str]:
    """Run a program that starts two processes, with these changes of the environment."""
    (folder / "program.py").write_text(textwrap.dedent(LAUNCH))
    changed = {name: value for name, value in {**os.environ, **environ}.items() if value is not None}
    return run_program("program.py", folder=folder, environ=changed)


def test_a_long_a_strange_or_no_temporary_folder_and_no_home_are_fine(tmp_path: Path) -> None:
    long = tmp_path / "ä\n" / ("x" * 100)
    long.mkdir(parents=True)
    done = launched(tmp_path, TMPDIR=str(long), HOME=None)
    assert (done.returncode, done.stdout) == (0, "[0, 1]\n"), done.stderr
    left = [path.name for path in long.iterdir()]
    assert not [name for name in left if not name.startswith("torchinductor_")]  # torch's cache, for all programs


def test_a_current_folder_that_was_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_steps=1, default_root_dir=tmp_path, **quiet)
    monkeypatch.chdir(gone)
    gone.rmdir()
    for fit in (lambda: trainer.fit(Regression(), loader()), Trainer):
        with pytest.raises(ConfigError, match="The current folder must exist, but it was deleted"):
            fit()


class Full:
    """A file on a disk without room."""

    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_temporary_folder_is_named_and_not_the_function() -> None:
    with pytest.raises(ProcessError, match=f"temporary folder '{tempfile.gettempdir()}' .*set TMPDIR"):
        pack_into(Full(), torch.ones(3), "function")  # type: ignore[arg-type]


def stop(pid: int) -> None:
    """Stop a process, and wait until it is stopped."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 60.0
    while look_at(pid).state != "stopped":
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_path_that_the_locale_lacks_is_named(tmp_path: Path) -> None:
    program = "from echelon import CSVLogger\nCSVLogger('\\xe4')\n"
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=400, check=False)
    assert "ConfigError: save_dir='\\xe4' has letters that the locale of this process, with ascii" in done.stderr


def test_starters_that_were_stopped_by_a_signal_are_named() -> None:
    nursery = processes.Nursery()
    pid = nursery.process.pid
    assert pid is not None
    stop(pid)
    try:
        with pytest.raises(ProcessError, match=rf"starts the servers \(process {pid}\) .* stopped by a signal"):
            nursery.ask("start", print, "never")
    finally:
        nursery.stop()
    fork_server.preload_modules(())
    server: Any = fork_server.forkserver._forkserver
    stop(server._forkserver_pid)
    try:
        with pytest.raises(ProcessError, match=f"fork server .*kill -CONT {server._forkserver_pid}"):
            fork_server.preload_modules(())
    finally:
        os.kill(server._forkserver_pid, signal.SIGCONT)
