"""How workers failed: which of several failures is the cause, and how it is raised in the caller."""

from __future__ import annotations

import re
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import torch.distributed as dist

from ..distributed.pickling import pack, unpack
from ..errors import ProcessError

# How the loss of a peer, which is no cause but a consequence, is told by those that still live.
_OF_A_PEER: Final = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe", re.IGNORECASE)


INTERRUPTED: Final = 128 + signal.SIGTERM
"""The exit code of a run that was asked to end, and did."""


class RankTraceback(Exception):  # noqa: N818 - no error of its own but the place of one
    """The traceback of an exception where it was raised, in a worker; the ``__cause__`` of that exception here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Failure:
    """What the function raised in one worker."""

    error: bytes | None
    """The exception, packed; None if it cannot be."""
    text: str
    traceback: str
    time: float
    blames_a_peer: bool
    is_exit: bool
    exit_code: int | None
    """That of a SystemExit, where it is a number."""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Take down an exception of this process."""
        try:
            packed = pack(error)
            unpack(packed)
        except Exception:  # noqa: BLE001 - whatever the exception's own class raises
            packed = None
        return cls(
            error=packed,
            text="".join(traceback.format_exception_only(error)).strip(),
            traceback="".join(traceback.format_exception(error)),
            time=time.time(),
            blames_a_peer=blames_a_peer(error),
            is_exit=isinstance(error, SystemExit | KeyboardInterrupt),
            exit_code=error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else None,
        )


def blames_a_peer(error: BaseException) -> bool:
    """Return whether an exception, or what it was raised from, is about another process that is gone."""
    chain = [error]
    while (link := chain[-1].__cause__) is not None and link not in chain:
        chain.append(link)
    return any(map(_is_of_a_peer, chain))


def _is_of_a_peer(error: BaseException) -> bool:
    if isinstance(error, dist.DistError | ConnectionError | ProcessError):
        return True
    return isinstance(error, RuntimeError) and bool(_OF_A_PEER.search(str(error)))


@dataclass(frozen=True)
class End:
    """The end of one worker that did not leave a result."""

    rank: int
    world_size: int
    pid: int
    exit_code: int
    failure: Failure | None

    @classmethod
    def read(cls, folder: Path, rank: int, world_size: int, pid: int, exit_code: int) -> Self:
        """Return the end of a worker with what it has left in the folder of the run."""
        file = folder / f"{rank}.failure"
        failure = unpack(file.read_bytes()) if file.exists() else None
        return cls(rank, world_size, pid, exit_code, failure)

    @property
    def was_told_to_end(self) -> bool:
        """Whether a signal that this worker was sent explains its end."""
        if self.failure is None:
            return self.exit_code in (-signal.SIGTERM, -signal.SIGKILL)
        return self.failure.is_exit

    @property
    def was_interrupted(self) -> bool:
        """Whether this worker has brought its run to an end because a signal asked a rank for that."""
        return self.failure is not None and self.failure.exit_code == INTERRUPTED

    @property
    def blames_a_peer(self) -> bool:
        """Whether this end is the consequence of another, as far as can be told from what was raised."""
        return self.failure is not None and self.failure.blames_a_peer

    @property
    def likelihood(self) -> tuple[int, float]:
        """How likely this end is a consequence of another, rather than the cause; and when it came."""
        if self.failure is None:
            return (1 if self.exit_code >= 0 else 2), 0.0
        return (3 if self.failure.blames_a_peer else 1 if self.failure.is_exit else 0), self.failure.time

    def describe(self) -> str:
        """Say who ended, and how."""
        who = f"Rank {self.rank} of {self.world_size} (process {self.pid})"
        if self.failure is not None:
            return f"{who} failed with {self.failure.text}"
        if self.exit_code >= 0:
            return f"{who} ended with exit code {self.exit_code} before the function had returned"
        try:
            name = signal.Signals(-self.exit_code).name
        except ValueError:
            name = f"signal {-self.exit_code}"
        return f"{who} was killed by {name}"

    def to_error(self) -> BaseException:
        """Return what to raise in the caller: the worker's own exception, if it could travel."""
        failure = self.failure
        if failure is None:
            hint = {
                -signal.SIGKILL: "If the kernel's out-of-memory killer did it (see dmesg), use less memory a process.",
                0: "Return from the function instead of os._exit(), and look at what the process has written.",
            }.get(self.exit_code, "Look at what the process has written; faulthandler.enable() shows where it was.")
            return ProcessError(f"{self.describe()}; the other workers were stopped. {hint}")
        error = _unpacked(failure)
        if error is None:
            reason = "Return from the function instead" if failure.is_exit else "See the traceback above"
            error = ProcessError(f"{self.describe()}; the other workers were stopped. {reason}.")
        else:
            error.add_note(f"Raised on rank {self.rank} of {self.world_size} (process {self.pid}).")
        error.__cause__ = RankTraceback(failure.traceback)
        return error


def _unpacked(failure: Failure) -> BaseException | None:
    if failure.error is None or failure.is_exit:
        return None
    try:
        error: BaseException = unpack(failure.error)
    except Exception:  # noqa: BLE001 - a class that only the worker can import
        return None
    return error
