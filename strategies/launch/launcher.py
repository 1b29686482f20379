"""Launch of worker processes as a function call, whose results and errors come back to the caller."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ...common.errors import CollectiveError, ConfigError, ProcessError
from ..cluster.environment import LOOPBACK, Environment
from ..distributed.call_record import describe_difference
from ..distributed.pickling import installed_modules, pack_into, pack_value, unpack_from
from .node_folder import NodeFolder, refuse_without_forks
from .registries import with_registries
from .signal_handlers import handling_signals
from .stack_dumps import dump_stacks
from .worker import IMPORTED_FIRST, CallerState, InheritedFile, WorkerTask

if TYPE_CHECKING:
    from .agent import Agent

T = TypeVar("T")
MakeAgent: TypeAlias = "Callable[[WorkerTask], Agent]"


def static_agents(num_processes: int, environment: Environment, start_timeout: timedelta) -> MakeAgent:
    """Return a factory of agents for `num_processes` on each node of `environment`."""

    def make(task: WorkerTask) -> Agent:
        from .static_agent import StaticAgent
        from .static_rendezvous import Rendezvous

        return StaticAgent(task, num_processes, Rendezvous(environment, start_timeout))

    return make


def launch_workers(
    function: Callable[[], T],
    make_agent: MakeAgent,
    *,
    is_local: bool,
    uses_devices: bool = False,
    parts: Mapping[str, object] | None = None,
    on_result: Callable[[T], None] | None = None,
) -> T:
    """Run `function` in new processes on this node and return the result of the first of them.

    A signal to the caller (SIGINT, SIGTERM, SIGUSR1) reaches the workers as SIGTERM, so that they can exit cleanly; a
    second one kills them.

    Args:
        function: the function to run; it, everything it refers to, and its result are sent by value.
        make_agent: makes the agent that starts and watches the workers.
        is_local: whether all processes of the run are on this machine.
        uses_devices: whether `function` uses CUDA devices.
        parts: objects that `function` holds, by name; an error about an attribute of one starts from that name.
        on_result: called with the result, before it is returned or the caller's signal is raised.

    Raises:
        ConfigError: if `function` or its result cannot be pickled, or if this process may not have children.
        ProcessError: if a process was killed or exited early, or a node did not join.
        KeyboardInterrupt: if the caller received SIGINT, once the workers have ended.
        SystemExit: with code 143 if it received SIGTERM or SIGUSR1, once the workers have ended.
        BaseException: whatever `function` raised in a worker, with the frames of the user's program in its traceback,
            and its rank as a note.
    """
    _check_process()
    signals = _SignalForwarding()
    with _making_task(function, parts, is_local=is_local, uses_devices=uses_devices) as task:
        with signals.listening():
            agent = _run_workers(task, make_agent, signals)
        _raise_failure(agent, signals)
        result: T = _read_result(task, agent.ranks[0])
    if on_result is not None:
        on_result(result)
    signals.raise_if_received()
    return result


def launch_all(function: Callable[[], T], *, num_processes: int, timeout: float, uses_devices: bool = False) -> list[T]:
    """Run `function` in new processes on this machine, for at most `timeout` seconds, and return all their results.

    Raises:
        ProcessError: as `launch_workers` does; also for ranks that did not finish in time, with the stack of each.
        BaseException: as `launch_workers` does.
    """
    _check_process()
    environment = Environment("none", 0, 0, 0, num_processes, num_processes, 1, LOOPBACK, None)
    signals = _SignalForwarding()
    with _making_task(function, None, is_local=True, keeps_all_results=True, uses_devices=uses_devices) as task:
        with signals.listening():
            make_agent = static_agents(num_processes, environment, timedelta(seconds=timeout))
            agent = _run_workers(task, make_agent, signals, timeout)
        _raise_failure(agent, signals)
        signals.raise_if_received()
        return [_read_result(task, rank) for rank in agent.ranks]


def _check_process() -> None:
    refuse_without_forks()
    process = multiprocessing.current_process()
    if process.daemon:
        raise ConfigError(
            f"A run of several processes was started in {process.name!r}, a daemon process, which multiprocessing does "
            "not allow to start processes. Start it in a process with daemon=False, or in one of "
            "concurrent.futures.ProcessPoolExecutor instead of multiprocessing.Pool; or train on one device."
        )


@contextlib.contextmanager
def _making_task(
    function: Callable[[], Any],
    parts: Mapping[str, object] | None,
    *,
    is_local: bool,
    keeps_all_results: bool = False,
    uses_devices: bool = False,
) -> Iterator[WorkerTask]:
    """Make the workers' task: a folder for their results, and the function in an unnamed file.

    Both may hold a module and a data set. The kernel removes the file when the last process closes it, however that
    process ends. The caller's environment, which may contain passwords, goes through a pipe.
    """
    modules: set[str] = set()
    with NodeFolder.create(Path(tempfile.gettempdir())) as folder, tempfile.TemporaryFile() as file:
        held: object = parts or getattr(function, "args", ())
        pack_into(file, with_registries(function, held), "function", parts, modules)
        file.flush()
        yield WorkerTask(
            folder.path,
            InheritedFile(file.fileno()),
            pack_value(CallerState.of_this_process(), "settings"),
            is_local=is_local,
            keeps_all_results=keeps_all_results,
            shows_stacks=keeps_all_results,
            modules=(*IMPORTED_FIRST, *installed_modules(modules)),
            uses_devices=uses_devices,
        )


def _read_result(task: WorkerTask, rank: int) -> Any:
    with (task.folder / f"{rank}.result").open("rb") as file:
        return unpack_from(file)


class _SignalForwarding:
    """Forwards the caller's signals to the workers, once there is an agent.

    A separate thread does this: a signal handler may itself be interrupted by the next signal, at any point, and would
    wait forever for a lock that it already holds. `SimpleQueue.put` is reentrant, and so safe in handlers.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._to_send: SimpleQueue[signal.Signals | None] = SimpleQueue()

    def _handle(self, number: int) -> None:
        is_first, self.received = self.received is None, self.received or number
        self._to_send.put(signal.SIGTERM if is_first else signal.SIGKILL)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the caller's signals inside the block, in the main thread."""
        with handling_signals(self._handle):
            yield

    @contextlib.contextmanager
    def forwarding(self, agent: Agent) -> Iterator[None]:
        """Forward signals inside the block, including those received before it."""

        def forward() -> None:
            while (number := self._to_send.get()) is not None:
                agent.send(number)

        thread = threading.Thread(target=forward, name="echelon-signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._to_send.put(None)
            thread.join()  # it holds the agent until it has returned

    def raise_if_received(self) -> None:
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(143)


def _run_workers(
    task: WorkerTask, make_agent: MakeAgent, signals: _SignalForwarding, timeout: float | None = None
) -> Agent:
    """Run the workers until all have exited, with or without a result."""
    agent = make_agent(task)
    signals.raise_if_received()  # one that came while make_agent() was still importing its modules
    errors: list[BaseException] = []
    ended = threading.Event()

    def watch() -> None:
        try:
            agent.run()
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            errors.append(error)
        finally:
            agent.has_started.set()
            ended.set()

    # In the main thread, elastic would install signal handlers and leave them there.
    thread = threading.Thread(target=watch, name="echelon-agent", daemon=True)
    try:
        with signals.forwarding(agent):
            thread.start()
            agent.has_started.wait()  # the fork server has to import torch first
            # not join(): if a user's signal handler raises inside it, CPython 3.11 considers the thread finished
            if not ended.wait(timeout):
                raise _timeout_error(task, agent, timeout)
    finally:
        if thread in threading.enumerate():
            if not ended.is_set():
                agent.send(signal.SIGKILL)
                ended.wait()
            thread.join()
        agent.release()
    if errors:
        signals.raise_if_received()
        raise errors.pop()  # this frame, which the error holds, must not hold the error
    return agent


def _timeout_error(task: WorkerTask, agent: Agent, timeout: float | None) -> ProcessError:
    """Return an error with the stacks of the ranks that have not finished."""
    told = dump_stacks(agent.running, task.folder)
    stacks = [f"rank {rank}:\n{text}" for rank, text in told.items()]
    return ProcessError(
        f"Rank {', '.join(map(str, told))} had not finished after timeout={timeout:g} s, and all were killed; raise "
        "the limit, or see from their stacks where they were:\n" + "\n".join(stacks)
    )


def without_launch(error: BaseException) -> BaseException:
    """Return an error raised by `launch_workers` without the frames of the launch, and any other error unchanged."""
    entry = error.__traceback__
    while entry is not None and entry.tb_frame.f_code is not _raise_failure.__code__:
        entry = entry.tb_next
    return error if entry is None else error.with_traceback(entry.tb_next)


def _called_differently(difference: str, error: BaseException) -> CollectiveError:
    """Return the error to raise instead of a torch error that names neither the call nor the ranks."""
    raised = CollectiveError(difference)
    for note in (f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())):
        raised.add_note(note)
    return raised


def _raise_failure(agent: Agent, signals: _SignalForwarding) -> None:
    if agent.deadlock is not None:
        raise CollectiveError(
            f"{agent.deadlock} No rank could go on, and all were stopped; resume with ckpt_path='last'."
        )
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
    if cause.may_be_of_calls_that_differ:
        difference = describe_difference({rank: agent.task.calls_file(rank) for rank in agent.ranks})
        if difference is not None:
            error = _called_differently(difference, error)
    if agent.report is not None:
        error.add_note(agent.report)
    raise error
