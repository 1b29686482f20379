"""Connection of a trainer to the servers: it starts them, waits for their answers, and reports who does not answer."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any, Final, TypeVar

from torch import Tensor

from ...common.errors import ConfigError, EchelonError, ProcessError
from ..cluster.environment import Environment, calls_file
from ..distributed.collectives import Collectives
from ..distributed.noticeboard import Noticeboard
from ..launch.node_folder import NodeFolder
from .flat_layout import num_bytes
from .meeting import Meeting
from .messages import Push, Updated
from .processes import ServerProcesses
from .server import LOST_PEERS, ServerTask, run_server
from .transport import Arguments, Peers, RequestError, Transport, server_name, trainer_name

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

_PATIENCE: Final = 1.0  # seconds after which to check whether those that are waited for are alive
_LOOK: Final = 0.1
_FAILED: Final = "failed"
_EXIT: Final = 0.3  # seconds that the kernel takes to report the end of a process whose connections have closed


@dataclass(frozen=True)
class Timeouts:
    """How long a trainer waits."""

    start: timedelta
    """For all peers to join."""
    answer: timedelta
    """For any sign of life from a peer."""
    push: timedelta
    """For a trainer that is alive but does not push its gradients."""


class _Presence:
    """Answers the pings of other peers, on a trainer."""

    def answer(self, request: str, arguments: tuple[object, ...]) -> object:
        return []


class Connection:
    """This trainer's calls to the servers of a run. Collective: every trainer creates one.

    Args:
        environment: the rank and node of this process.
        collectives: of the trainers.
        store: a store that all trainers reach; None for one trainer.
        num_servers: the number of servers; None for one on each node.
        max_staleness: see `StalenessBound`; None for sync mode.
        timeouts: how long to wait.

    Raises:
        ProcessError: for a server that ends during start-up, and for peers that do not join.
    """

    def __init__(
        self,
        environment: Environment,
        collectives: Collectives,
        store: Store | None,
        *,
        num_servers: int | None,
        max_staleness: int | None,
        timeouts: Timeouts,
    ) -> None:
        self._collectives, self._timeouts = collectives, timeouts
        self._environment = environment
        self._folder = _Folder.create() if environment.rank == 0 else None
        self.rank = environment.rank
        self.sent = self.received = 0
        """Bytes of tensors that went to the servers and came from them."""
        self.waited = 0.0
        """Seconds that this trainer has waited for answers."""

        def call() -> tuple[str, Meeting]:
            assert self._folder is not None
            return secrets.token_hex(4), Meeting.call(environment, self._folder.path, timeouts.start)

        token, meeting = collectives.on_first_rank(call)
        self.num_servers = environment.num_nodes if num_servers is None else num_servers
        self.peers = Peers(environment.world_size, self.num_servers, token)
        self._notices = None if store is None else Noticeboard(store, f"servers/{token}")
        self._processes: ServerProcesses | None = None
        self._joining: Future[Transport] = Future()
        try:
            own = self._own_servers(by_node=num_servers is None)
            if own:
                num_neighbours = environment.local_world_size + len(own)
                tasks = {
                    i: ServerTask(i, self.peers, meeting, timeouts.start, max_staleness, num_neighbours) for i in own
                }
                self._processes = ServerProcesses.start(run_server, tasks)
            self._transport: Transport = self._joined(meeting)
        except BaseException as error:
            self._tell(error)
            self._clean_up()
            raise

    def _own_servers(self, *, by_node: bool) -> list[int]:
        """Return the servers that this process starts."""
        environment = self._environment
        if by_node:
            return [environment.node_rank] if environment.local_rank == 0 else []
        return list(range(self.num_servers)) if environment.rank == 0 else []

    def _joined(self, meeting: Meeting) -> Transport:
        """Join the peers, in a thread: torch would wait for a peer that has died, and block signals meanwhile."""
        joined = self._joining
        is_given_up = threading.Event()

        def join() -> None:
            service, limit = _Presence(), self._timeouts.start
            try:
                joined.set_result(meeting.join(trainer_name(self.rank), self.peers, service, limit, is_given_up))
            except BaseException as error:  # noqa: BLE001 - raised in the trainer's thread
                joined.set_exception(error)

        threading.Thread(target=join, name="echelon-servers", daemon=True).start()
        try:
            while True:
                try:
                    return joined.result(timeout=_LOOK)
                except NotYet:
                    self._look_at_start()
                except EchelonError:
                    raise
                except (ConnectionError, RuntimeError) as error:
                    raise self._not_met(error) from error
        except BaseException:
            is_given_up.set()
            joined.add_done_callback(_leave_late_peers)
            raise

    def _look_at_start(self) -> None:
        """Raise an error if a server of this process is gone or stopped, or another trainer has given up."""
        self._look_at_processes(None)
        if self._processes is not None:
            limit = self._timeouts.answer.total_seconds()
            stopped = self._processes.stopped_for(limit / _LOOK)
            if stopped is not None:
                raise ProcessError.of_server(
                    f"Server {stopped} of {self.num_servers} (process {self._processes.pids[stopped]}) was stopped by "
                    f"a signal at the start of the run, and did not resume within {limit:g} s; start the run again."
                )
        self._look_at_notices()

    def _look_at_notices(self) -> None:
        if self._notices is None:
            return
        try:
            reason = self._notices.read(_FAILED)
        except RuntimeError as error:
            reason = f"the store of the run is gone ({_shorten_error(error)})"
        if reason is not None:
            raise ProcessError(f"Rank {self.rank} did not meet the servers: {reason}")

    def _not_met(self, error: BaseException) -> ProcessError:
        self._look_at_processes(error)
        self._look_at_notices()
        return ProcessError(
            f"Rank {self.rank} did not meet the {self.num_servers} servers and {self.peers.num_trainers} trainers of "
            f"the run ({_shorten_error(error)}): one of them has ended, or did not connect within "
            f"start_timeout={self._timeouts.start.total_seconds():g} s; see the output of the others."
        )

    def _tell(self, error: BaseException) -> None:
        """Tell the trainers that still wait for the servers that they will not come."""
        if self._notices is not None and isinstance(error, ProcessError) and error.is_of_server:
            with suppress(RuntimeError):  # nobody is left to read it
                self._notices.post(_FAILED, str(error))

    # --- calls -------------------------------------------------------------------------------------------------------

    def ask(self, request: str, messages: Mapping[int, tuple[object, ...]]) -> dict[int, Any]:
        """Send each of these servers its message, and return their answers.

        Raises:
            ProcessError: naming the server that failed, or is gone, or the trainer for which it waits.
        """
        calls = {
            index: self._transport.call(server_name(index), request, *message) for index, message in messages.items()
        }
        self.sent += sum(num_bytes(_tensors_of(part)) for message in messages.values() for part in message)
        begin = time.monotonic()
        answers = {index: self._wait(index, call) for index, call in calls.items()}
        self.waited += time.monotonic() - begin
        self.received += sum(num_bytes(_tensors_of(answer)) for answer in answers.values())
        return answers

    def _wait(self, index: int, call: Future[T]) -> T:
        end = time.monotonic() + self._timeouts.push.total_seconds()
        while True:
            try:
                return call.result(timeout=_PATIENCE)
            except NotYet:
                self._look(index, is_over=time.monotonic() > end)
            except ConnectionError as error:
                raise self._lost(index, error) from error
            except RequestError as error:
                failure = ProcessError.of_server(f"Server {index} of {self.num_servers} failed with {error}.")
                failure.__cause__ = error
                raise failure from error

    def _look(self, index: int, *, is_over: bool) -> None:
        """Raise an error if a server does not answer, or a trainer for which it waits does not."""
        limit = self._timeouts.answer.total_seconds()
        ping = self._transport.call(server_name(index), "ping", timeout=limit)
        missing = self._pong(ping, partial(self._lost, index))
        others = [rank for rank in missing if rank != self.rank]
        pings = {rank: self._transport.call(trainer_name(rank), "ping", timeout=limit) for rank in others}
        for rank, call in pings.items():
            self._pong(call, partial(self._lost_trainer, rank))
        if is_over:
            raise ProcessError(
                f"Server {index} of {self.num_servers} has waited timeout={self._timeouts.push.total_seconds():g} s "
                f"for rank {', '.join(map(str, missing))}, which is alive but pushes nothing; see its output, or give "
                "the strategy a longer timeout."
            )

    def _pong(self, call: Future[T], blame: Callable[[BaseException], ProcessError]) -> T:
        while True:
            try:
                return call.result(timeout=_PATIENCE)
            except NotYet:
                continue
            except (ConnectionError, RequestError) as error:
                raise blame(error) from error

    def _lost(self, index: int, error: BaseException) -> ProcessError:
        """Return the error for a server that is gone, or does not answer."""
        self._look_at_processes(error)
        if self._processes is None:
            time.sleep(_EXIT)  # the trainer that started it knows how it ended, and shall report it first
        return ProcessError.of_server(
            f"Server {index} of {self.num_servers} does not answer rank {self.rank} ({_shorten_error(error)}); it was "
            "killed, or stopped, or cannot be reached. Resume with ckpt_path='last'."
        )

    def _lost_trainer(self, rank: int, error: BaseException) -> ProcessError:
        return ProcessError(
            f"Rank {rank} of {self.peers.num_trainers} does not answer rank {self.rank} ({_shorten_error(error)}); it "
            "was killed, or stopped, or cannot be reached. Resume with ckpt_path='last'."
        )

    def _look_at_processes(self, error: BaseException | None) -> None:
        """If a server started by this process has ended, raise an error that says how."""
        processes = self._processes
        for index in processes.pids if processes is not None else ():
            assert processes is not None
            code = _find_within(partial(processes.exit_code, index), _EXIT if error is not None else 0.0)
            if code == LOST_PEERS:
                raise ProcessError(
                    f"Server {index} of {self.num_servers} (process {processes.pids[index]}) did not meet the others; "
                    "see its output, and that of the ranks."
                ) from error
            if code is not None:
                how = f"was killed by {Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                raise ProcessError.of_server(
                    f"Server {index} of {self.num_servers} (process {processes.pids[index]}) {how}, which ended the "
                    "run. Resume with ckpt_path='last'; dmesg shows whether it was the out-of-memory killer."
                ) from error

    def try_ask(self, request: str, index: int, *message: object) -> Any:
        """Return the answer of a server that may be gone; None if it is, or shows no sign of life for a second."""
        call = self._transport.call(server_name(index), request, *message)
        with suppress(ConnectionError, RequestError):
            while True:
                try:
                    return call.result(timeout=_PATIENCE)
                except NotYet:
                    self._transport.call(server_name(index), "ping", timeout=_PATIENCE).result()
        return None

    def meet(self) -> None:
        """Wait for the other trainers. Collective: every trainer calls it."""
        self._collectives.barrier()

    def invoke(
        self, how: str, peer: str, function: Callable[..., object], arguments: Arguments, timeout: float
    ) -> object:
        """Call a user's function in a peer.

        Raises:
            ConfigError: for a peer that does not exist.
        """
        if peer not in self.peers.names:
            raise ConfigError(f"to={peer!r} is not a peer of this run; use one of {', '.join(self.peers.names)}.")
        return self._transport.invoke(how, peer, function, arguments, timeout)

    # --- end ---------------------------------------------------------------------------------------------------------

    def close(self, *, has_failed: bool) -> None:
        """Leave the servers, which then end; in an orderly way, unless the run has failed."""
        try:
            if not has_failed:
                self._collectives.barrier()  # nobody asks for anything from here on
                if self.rank == 0:
                    self.ask("end", dict.fromkeys(range(self.num_servers), ()))
                self._collectives.barrier()
            else:  # so that servers do not warn of it; those that are alive answer at once
                calls = [
                    self._transport.call(server_name(i), "end", timeout=_PATIENCE) for i in range(self.num_servers)
                ]
                wait(calls, timeout=_PATIENCE)
            self._transport.close()
            if not has_failed:
                self._collectives.barrier()  # nobody would miss the servers
        finally:
            self._clean_up()

    def _clean_up(self) -> None:
        if self._processes is not None:
            self._processes.end()
        wait([self._joining], timeout=_PATIENCE)  # in the thread, torch would still look for the store after it is gone
        if self._folder is not None:
            self._folder.remove()


def _leave_late_peers(joined: Future[Transport]) -> None:
    """Leave peers that were joined too late."""
    if joined.exception() is None:
        joined.result().close()


class _Folder:
    """A folder for the store, which is removed even if this process is killed."""

    def __init__(self, path: Path, own: NodeFolder | None) -> None:
        self.path, self._own = path, own

    @classmethod
    def create(cls) -> _Folder:
        """Create one, inside the folder of the launch if there is one, as that is removed in any case."""
        calls = calls_file()
        if calls is not None:
            return cls(Path(tempfile.mkdtemp(prefix="echelon-servers-", dir=calls.parent)), None)
        own = NodeFolder.create(Path(tempfile.gettempdir()))
        return cls(own.path, own)

    def remove(self) -> None:
        """Remove it, if it exists."""
        if self._own is not None:
            self._own.remove()
        else:
            shutil.rmtree(self.path, ignore_errors=True)


def _find_within(look: Callable[[], T | None], seconds: float) -> T | None:
    """Return what is found within some seconds: a connection breaks before the process is gone."""
    end = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() < end:
        time.sleep(_LOOK / 10)
    return found


def _shorten_error(error: BaseException) -> str:
    return str(error).split(" (this error originated")[0][:120]


def _tensors_of(message: object) -> list[Tensor]:
    """Return the tensors of a message."""
    if isinstance(message, Tensor):
        return [message]
    if isinstance(message, Push):
        return [*message.flats, *(t for rows in message.rows.values() for t in (rows.ids, rows.values))]
    if isinstance(message, Updated):
        return list(message.flats)
    return [part for part in message if isinstance(part, Tensor)] if isinstance(message, list) else []
