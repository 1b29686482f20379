"""Failures of workers: finding the cause among several, and the error to raise in the caller."""

from __future__ import annotations

import logging
import re
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import torch.distributed as dist

from ...common.errors import CollectiveError, EchelonError, ProcessError
from ..distributed.pickling import pack_value, unpack_value
from .rank_traceback import Frame, frames_for_users, rebuild_traceback

_log = logging.getLogger(__name__)

# Errors about a lost peer: consequences of another failure, raised by the surviving processes.
_LOST_PEER: Final = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe", re.IGNORECASE)

INTERRUPTED: Final = 128 + signal.SIGTERM
"""Exit code of a run that was asked to end, and ended cleanly."""


class RankTraceback(Exception):  # noqa: N818 - not an error of its own but the place of one
    """The exceptions that led to one in a worker, as text: the ``__cause__`` of that exception in the caller."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Failure:
    """Exception that the function raised in one worker."""

    error: bytes | None
    """The exception, pickled; None if it cannot be pickled."""
    text: str
    traceback: str
    """The whole traceback, for developers of Echelon."""
    frames: list[Frame]
    """The frames to show to the user."""
    origin: str
    """The tracebacks of the exceptions that led to it; empty if there were none."""
    time: float
    blames_a_peer: bool
    is_exit: bool
    is_of_server: bool
    """Whether a parameter server is at fault."""
    is_explained: bool
    """Whether Echelon raised it on purpose, and it says itself what is wrong on this rank."""
    exit_code: int | None
    """The code of a SystemExit, if it is a number."""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return a description of an exception of this process."""
        try:
            packed = pack_value(error)
            unpack_value(packed)
        except Exception:  # noqa: BLE001 - the exception's own class may raise anything
            packed = None
        return cls(
            error=packed,
            text="".join(traceback.format_exception_only(error)).strip(),
            traceback="".join(traceback.format_exception(error)),
            frames=frames_for_users(error),
            origin=_format_origin(error),
            time=time.time(),
            blames_a_peer=blames_a_peer(error),
            is_of_server=_is_of_server(error),
            is_explained=isinstance(error, EchelonError) and not isinstance(error, ProcessError | CollectiveError),
            is_exit=isinstance(error, SystemExit | KeyboardInterrupt),
            exit_code=error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else None,
        )


def _format_origin(error: BaseException) -> str:
    origin = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "" if origin is None else "".join(traceback.format_exception(origin))


def blames_a_peer(error: BaseException) -> bool:
    """Return whether an exception, or one that it was raised from, is about another process being gone."""
    chain = [error]
    while (link := chain[-1].__cause__) is not None and link not in chain:
        chain.append(link)
    return not _is_of_server(error) and any(map(_is_about_a_peer, chain))


def _is_of_server(error: BaseException) -> bool:
    return isinstance(error, ProcessError) and error.is_of_server


def _is_about_a_peer(error: BaseException) -> bool:
    if _is_of_server(error):  # no other rank will report it
        return False
    if isinstance(error, dist.DistError | ConnectionError | ProcessError):
        return True
    return isinstance(error, RuntimeError) and bool(_LOST_PEER.search(str(error)))


@dataclass(frozen=True)
class WorkerExit:
    """Exit of a worker that left no result."""

    rank: int
    world_size: int
    pid: int
    exit_code: int
    failure: Failure | None

    @classmethod
    def read(cls, folder: Path, rank: int, world_size: int, pid: int, exit_code: int) -> Self:
        """Return the exit of a worker, with the failure that it left in the folder of the run."""
        file = folder / f"{rank}.failure"
        failure = unpack_value(file.read_bytes()) if file.exists() else None
        return cls(rank, world_size, pid, exit_code, failure)

    @property
    def was_told_to_end(self) -> bool:
        """Whether a signal sent to this worker explains its exit."""
        if self.failure is None:
            return self.exit_code in (-signal.SIGTERM, -signal.SIGKILL)
        return self.failure.is_exit

    @property
    def was_interrupted(self) -> bool:
        """Whether this worker ended its run cleanly because a rank received a signal."""
        return self.failure is not None and self.failure.exit_code == INTERRUPTED

    @property
    def blames_a_peer(self) -> bool:
        """Whether this exit is the consequence of another, judging by its exception."""
        return self.failure is not None and self.failure.blames_a_peer

    @property
    def may_be_of_calls_that_differ(self) -> bool:
        """Whether a collective that differs from the peers' may be the cause: gloo then aborts, or times out."""
        if self.failure is None:
            return self.exit_code == -signal.SIGABRT
        if self.failure.is_of_server or self.failure.is_explained:
            return False  # the other ranks have only gone on
        frames = self.failure.frames
        return self.failure.blames_a_peer or (bool(frames) and frames[-1].is_own)

    @property
    def likelihood(self) -> tuple[int, float]:
        """Sort key, smallest for the likely cause: how likely this exit is a consequence of another, then its time."""
        if self.failure is None:
            return (1 if self.exit_code >= 0 else 2), 0.0
        return (3 if self.failure.blames_a_peer else 1 if self.failure.is_exit else 0), self.failure.time

    def describe(self) -> str:
        """Return a text that says which rank exited, and how."""
        rank = f"Rank {self.rank} of {self.world_size} (process {self.pid})"
        if self.failure is not None:
            return f"{rank} failed with {self.failure.text}"
        if self.exit_code >= 0:
            return f"{rank} ended with exit code {self.exit_code} before the function returned"
        try:
            name = signal.Signals(-self.exit_code).name
        except ValueError:
            name = f"signal {-self.exit_code}"
        return f"{rank} was killed by {name}"

    def to_error(self) -> BaseException:
        """Return the error to raise in the caller: the worker's own exception, if it could be pickled.

        Its traceback ends with the frames of the user's program in the worker; the full one is logged at level DEBUG.
        """
        failure = self.failure
        if failure is None:
            hint = {
                -signal.SIGKILL: "Use less memory per process if it was the out-of-memory killer (see dmesg).",
                0: "Return from the function instead of calling os._exit(), and look at the output of the process.",
            }.get(
                self.exit_code,
                "Look at the output of the process; faulthandler.enable() adds the stack at a fatal signal.",
            )
            return ProcessError.of_ranks(f"{self.describe()}; the other workers were stopped. {hint}", self.rank)
        error = _unpickle_error(failure)
        if error is None:
            remedy = "Return from the function instead" if failure.is_exit else "See the traceback above"
            message = f"{self.describe()}; the other workers were stopped. {remedy}."
            error = ProcessError.of_ranks(message, self.rank)
        else:
            error.add_note(f"Raised on rank {self.rank} of {self.world_size} (process {self.pid}).")
        _log.debug("%s; the whole traceback:\n%s", self.describe(), failure.traceback)
        if failure.origin:
            error.__cause__ = RankTraceback(failure.origin)
        return error.with_traceback(rebuild_traceback(failure.frames))


def _unpickle_error(failure: Failure) -> BaseException | None:
    if failure.error is None or failure.is_exit:
        return None
    try:
        error: BaseException = unpack_value(failure.error)
    except Exception:  # noqa: BLE001 - its class may be importable only in the worker
        return None
    return error
