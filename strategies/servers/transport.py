"""Transport: the Protocol by which trainers and servers call each other; `tensorpipe` implements it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol


class Service(Protocol):
    """Answers the requests of a process's peers, from any thread."""

    def answer(self, request: str, arguments: tuple[object, ...]) -> object:
        """Return the answer, or a `Future` of it if it has to wait for other peers."""


class Transport(Protocol):
    """The calls between the processes of a run, which know each other by name."""

    def call(self, peer: str, request: str, *arguments: object, timeout: float = 0) -> Future[Any]:
        """Send a request, with tensors on the CPU; a `timeout` of 0 waits for as long as the peer lives.

        The future raises ConnectionError if the peer is gone or takes longer, and `RequestError` if it failed.
        """

    def invoke(
        self, how: str, peer: str, function: Callable[..., object], arguments: Arguments, timeout: float
    ) -> object:
        """Call a user's function in a peer; `how` is ``"sync"``, ``"async"`` or ``"remote"``."""

    def close(self) -> None:
        """Leave the other peers, without waiting for any."""


@dataclass(frozen=True)
class Arguments:
    """Arguments of a user's call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class RequestError(Exception):
    """A peer failed to answer a request; the message is that of its error."""


@dataclass(frozen=True)
class Peers:
    """The processes of a run that call each other, by name: trainers first."""

    num_trainers: int
    num_servers: int
    token: str
    """Tells apart successive runs in one process."""

    @property
    def names(self) -> list[str]:
        """The names of all, in the order of their numbers."""
        return [trainer_name(rank) for rank in range(self.num_trainers)] + [
            server_name(i) for i in range(self.num_servers)
        ]


def trainer_name(rank: int) -> str:
    """Return the name of a trainer."""
    return f"trainer{rank}"


def server_name(index: int) -> str:
    """Return the name of a server."""
    return f"server{index}"
