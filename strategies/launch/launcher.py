"""Launch of worker processes as a function call: results and errors come back to the caller."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

from ..cluster.environment import LOOPBACK, Environment
from ..distributed.pickling import installed, pack, unpack
from ..errors import ProcessError
from .worker import SHOW_STACKS, CallerState, WorkerTask

if TYPE_CHECKING:
    from .agent import Agent

T = TypeVar("T")
MakeAgent: TypeAlias = "Callable[[WorkerTask], Agent]"

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_STACKS_TIMEOUT: Final = 2.0  # seconds in which workers write their stacks


def static_agents(num_processes: int, environment: Environment, start_timeout: timedelta) -> MakeAgent:
    """Return a factory of agents for `num_processes` on each of the nodes of `environment`."""

    def make(task: WorkerTask) -> Agent:
        from .static_agent import StaticAgent
        from .static_rendezvous import Rendezvous

        return StaticAgent(task, num_processes, Rendezvous(environment, start_timeout))

    return make


def launch(
    function: Callable[[], T],
    make_agent: MakeAgent,
    *,
    is_local: bool,
    parts: Mapping[str, object] | None = None,
    on_result: Callable[[T], None] | None = None,
) -> T:
    """Run `function` in new processes of this node and return the result of the first of them.

    A signal to the caller (SIGINT, SIGTERM, SIGUSR1) reaches the workers as SIGTERM, so that they can end in order; a
    second one kills them.

    Args:
        function: the function to run; it, all that it refers to, and its result are sent by value.
        make_agent: makes the agent that starts and watches the workers.
        is_local: whether all processes of the run are on this machine.
        parts: objects that `function` holds, by name; errors name the attribute that cannot be pickled by them.
        on_result: called with the result, before it is returned or the caller's signal is raised.

    Raises:
        ConfigError: if `function` or its result cannot be pickled.
        ProcessError: if a process was killed or left early, or a node did not come.
        KeyboardInterrupt: if the caller received SIGINT, once the workers have ended.
        SystemExit: with 143, likewise, after SIGTERM or SIGUSR1.
        BaseException: what `function` raised in a worker, with its rank as a note and its traceback as the cause.
    """
    with _folder() as folder:
        modules = _fill(folder, function, parts)
        task = WorkerTask(folder, is_local=is_local, keeps_all_results=False, modules=modules)
        with _SignalForwarding() as signals:
            agent = _run(task, make_agent, signals)
        _raise_failure(agent, signals)
        result: T = _result(task, agent.ranks[0])
    if on_result is not None:
        on_result(result)
    signals.raise_if_received()
    return result


def launch_all(function: Callable[[], T], *, num_processes: int, timeout: float) -> list[T]:
    """Run `function` in new processes of this machine, for at most `timeout` seconds, and return all their results.

    Raises:
        ProcessError: as `launch`; also for ranks that had not finished in time, with the stack of each.
        BaseException: as `launch`.
    """
    environment = Environment("none", 0, 0, 0, num_processes, num_processes, 1, LOOPBACK, None)
    with _folder() as folder:
        modules = _fill(folder, function, None)
        task = WorkerTask(folder, is_local=True, keeps_all_results=True, shows_stacks=True, modules=modules)
        with _SignalForwarding() as signals:
            make_agent = static_agents(num_processes, environment, timedelta(seconds=timeout))
            agent = _run(task, make_agent, signals, timeout)
        _raise_failure(agent, signals)
        signals.raise_if_received()
        return [_result(task, rank) for rank in agent.ranks]


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Make a folder that only this user can open, since its files are unpickled."""
    folder = Path(tempfile.mkdtemp(prefix="echelon-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(folder: Path, function: Callable[[], Any], parts: Mapping[str, object] | None) -> tuple[str, ...]:
    """Write the files that workers read; return the installed modules that they will import."""
    modules: set[str] = set()
    (folder / "function").write_bytes(pack(function, "function", parts, modules))
    (folder / "settings").write_bytes(pack(CallerState.of_this_process(), "settings"))
    return tuple(installed(modules))


def _result(task: WorkerTask, rank: int) -> Any:
    return unpack((task.folder / f"{rank}.result").read_bytes())


class _SignalForwarding:
    """Forwards the caller's signals to the workers; only in the main thread, as Python can handle them nowhere else."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.agent: Agent | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _SignalForwarding:
        if threading.current_thread() is threading.main_thread():
            handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
            self._before = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        is_first, self.received = self.received is None, self.received or number
        if self.agent is not None:
            self.agent.send(signal.SIGTERM if is_first else signal.SIGKILL)

    def raise_if_received(self) -> None:
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(143)


def _run(task: WorkerTask, make_agent: MakeAgent, signals: _SignalForwarding, timeout: float | None = None) -> Agent:
    """Run the workers until all have exited, with or without a result."""
    agent = signals.agent = make_agent(task)
    signals.raise_if_received()  # one that came while make_agent() was still importing its modules
    errors: list[BaseException] = []

    def watch() -> None:
        try:
            agent.run()
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            errors.append(error)
        finally:
            agent.has_started.set()

    # In the main thread elastic would install signal handlers, and leave them there.
    thread = threading.Thread(target=watch, name="echelon-agent", daemon=True)
    thread.start()
    try:
        agent.has_started.wait()  # the fork server has to import torch first
        thread.join(timeout)
        if thread.is_alive():
            raise _timeout_error(task, agent, timeout)
    finally:
        if thread.is_alive():
            agent.send(signal.SIGKILL)
            thread.join()
        agent.release()
    if errors:
        signals.raise_if_received()
        raise errors[0]
    return agent


def _timeout_error(task: WorkerTask, agent: Agent, timeout: float | None) -> ProcessError:
    """Return the error with the stacks of the ranks that have not finished."""
    ranks = agent.running
    agent.send(SHOW_STACKS)
    files = {rank: task.folder / f"{rank}.stacks" for rank in ranks}
    end = time.monotonic() + _STACKS_TIMEOUT
    while time.monotonic() < end and not all(file.exists() and file.stat().st_size for file in files.values()):
        time.sleep(0.05)
    stacks = [f"rank {rank}:\n{file.read_text() if file.exists() else ''}" for rank, file in files.items()]
    return ProcessError(
        f"Rank {', '.join(map(str, ranks))} had not finished after timeout={timeout:g} s, and all were killed; raise "
        "the limit, or see from their stacks where they stood:\n" + "\n".join(stacks)
    )


def _raise_failure(agent: Agent, signals: _SignalForwarding) -> None:
    if not agent.failed and agent.failure_elsewhere is None:
        return
    cause = min(agent.failed, key=lambda worker: worker.likelihood, default=None)
    if signals.received is not None and (cause is None or cause.was_told_to_end):
        signals.raise_if_received()
    if agent.failure_elsewhere is not None and (cause is None or cause.blames_a_peer):
        raise ProcessError(
            f"{agent.failure_elsewhere}; the workers of this node were stopped. See the output of that node."
        )
    assert cause is not None
    error = cause.to_error()
    if agent.report is not None:
        error.add_note(agent.report)
    raise error
