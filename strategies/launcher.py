"""Starting the processes of this node when nobody else has, as a function call: its result and its errors come back."""

from __future__ import annotations

import logging
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from .environment import Environment
from .errors import ProcessError
from .travel import pack, unpack
from .worker import Failure, Job, Settings

if TYPE_CHECKING:
    from .agent import Agent

T = TypeVar("T")


class RankTraceback(Exception):  # noqa: N818 - it is no error of its own but the place of one
    """The traceback of an exception as it was in the process that raised it; the cause of that exception here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def launch_all(
    function: Callable[[], T],
    *,
    num_processes: int,
    parts: Mapping[str, object] | None = None,
    timeout: float | None = None,
) -> list[T]:
    """Run `function` in new processes of this machine and return all results, by rank."""
    folder = Path(tempfile.mkdtemp(prefix="echelon-"))
    try:
        (folder / "function").write_bytes(pack(function, parts=parts))
        (folder / "settings").write_bytes(pack(Settings.of_this_process(is_local=True)))
        return _run(Job(folder, keeps_all_results=True), num_processes, timeout)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(job: Job, num_processes: int, timeout: float | None) -> list[Any]:
    from .agent import Agent
    from .local_rendezvous import LocalRendezvous

    agent = Agent(job, num_processes, LocalRendezvous())
    errors: list[BaseException] = []

    def watch() -> None:
        try:
            agent.run()
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            errors.append(error)

    # In a thread of its own, because elastic would else install signal handlers, for good.
    thread = threading.Thread(target=watch, name="echelon agent", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        agent.send(signal.SIGKILL)
        thread.join()
        raise ProcessError(f"Ranks had not finished after timeout={timeout:g} s; raise it.")
    if errors:
        raise errors[0]
    for rank in agent.pids:
        if (job.folder / f"{rank}.failure").exists():
            failure = unpack((job.folder / f"{rank}.failure").read_bytes())
            error = unpack(failure.error)
            error.add_note(f"Raised on rank {rank} of {num_processes}.")
            raise error from RankTraceback(failure.traceback)
    if any(agent.exit_codes.values()):
        raise ProcessError(f"A rank died: exit codes {agent.exit_codes}; see its output.")
    return [unpack((job.folder / f"{rank}.result").read_bytes()) for rank in agent.pids]


def launch(
    function: Callable[[], T],
    *,
    num_processes: int,
    environment: Environment,
    start_timeout: timedelta,
    parts: Mapping[str, object] | None = None,
    on_result: Callable[[T], None] | None = None,
) -> T:
    """Run `function` in `num_processes` new processes of this node and return what its first one returned."""
    result = launch_all(function, num_processes=num_processes, parts=parts)[0]
    if on_result is not None:
        on_result(result)
    return result
