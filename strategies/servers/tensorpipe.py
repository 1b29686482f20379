"""TensorPipe, torch's transport of remote calls: all of it that Echelon uses. torch no longer develops it.

Every peer may call any function in every other: who can connect can run anything. `meeting` says who can.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

import torch
from torch.distributed import Store, rpc  # type: ignore[attr-defined]  # as its documentation has it
from torch.distributed.rpc import functions

from ..cluster.environment import overridden
from ..distributed.pickling import PICKLING_ERRORS, pack, unpack
from ..errors import ConfigError, RunError
from ..torch_internals import join_rpc
from .transport import Arguments, Peers, RequestError, Service

_LOOK: Final = 0.01  # seconds between two looks at the store

_SERVICES: Final[list[Service]] = []
"""That of this process, while it is a peer: torch has one agent a process."""


class TensorPipe:
    """This process as a peer of a run. Collective: all peers make one, at the same time.

    Args:
        name: its name.
        peers: all of them.
        store: a store of torch's that all peers share.
        service: what it answers with.
        interface: variables that say on which network it listens.
        start_timeout: seconds for which the others are waited for.
        is_given_up: once it is set, by another thread, the others are not waited for any longer.

    Raises:
        RunError: if this process has called ``torch.distributed.rpc.init_rpc`` itself.
        ConnectionError: if peers do not come, or are lost.
    """

    def __init__(
        self,
        name: str,
        peers: Peers,
        store: Any,
        service: Service,
        *,
        interface: Mapping[str, str],
        start_timeout: timedelta,
        is_given_up: threading.Event,
    ) -> None:
        self._peers = peers
        rank = peers.names.index(name)
        # by shared memory a thread of each process would look for messages all the time, on a core of its own
        options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=start_timeout.total_seconds(), _transports=["uv"])
        if _SERVICES or rpc.api._is_current_rpc_agent_set():  # type: ignore[attr-defined]  # noqa: SLF001 - no public name
            raise RunError(
                "torch.distributed.rpc must not be initialised before a fit with parameter servers, found that it is; "
                "leave out init_rpc, and call peers by trainer.strategy.rpc_sync."
            )
        _SERVICES.append(service)
        self._store = _PatientStore(store, start_timeout, is_given_up)  # torch does not keep it alive
        try:
            with warnings.catch_warnings(), overridden(interface):
                warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch's own use of it
                join_rpc(self._internal(name), rank, len(peers.names), self._store, options)
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception):
                raise
            # torch has several kinds, and one error hides another where it logs it
            raise ConnectionError(str(error.__context__ or error)) from error

    def _internal(self, name: str) -> str:
        # torch counts its barriers by the names of the peers: those of an earlier run in this process had others
        return f"{name}-{self._peers.token}"

    def call(self, peer: str, request: str, *arguments: Any, timeout: float = 0) -> Future[Any]:
        """Send a request; see `Transport`."""
        answer: Future[Any] = Future()
        try:
            future = rpc.rpc_async(self._internal(peer), _answer, (request, arguments), timeout=timeout)
        except RuntimeError as error:
            answer.set_exception(ConnectionError(str(error)))
        else:
            future.add_done_callback(lambda done: _take(done, answer))
        return answer

    def invoke(self, how: str, peer: str, function: Callable[..., Any], arguments: Arguments, timeout: float) -> Any:
        """Call a function of the user's in a peer; see `Transport`."""
        call: Any = rpc.remote if how == "remote" else rpc.rpc_async
        packed = _packed(function) if isinstance(function, Hashable) else pack(function)
        sent = packed, arguments.args, dict(arguments.kwargs)
        try:
            result = call(self._internal(peer), _invoke, sent, timeout=timeout)
        except PICKLING_ERRORS as error:  # by torch, before anything is sent
            raise ConfigError(
                f"The arguments cannot be sent to {peer}: {error}; give tensors, numbers, lists, references and "
                "functions that can be imported, and make other objects in the function."
            ) from error
        return result.wait() if how == "sync" else result

    def close(self) -> None:
        """Leave the others; see `Transport`.

        torch's graceful end would wait for a peer that is gone, and counts the ends of each process: a server that has
        just been started has seen fewer than its trainers.
        """
        try:
            with (
                _without_warnings(),
                suppress(RuntimeError),
            ):  # no agent yet, or a reference of the user's to what a peer holds
                rpc.shutdown(graceful=False)
        finally:
            _SERVICES.clear()


class _PatientStore(Store):
    """A store whose waits let other threads run.

    torch's agent asks for the names of its peers with the interpreter's lock held: a peer that died just before would
    stop all threads of this process for as long as the store waits.
    """

    def __init__(self, store: Any, limit: timedelta, is_given_up: threading.Event) -> None:
        super().__init__()
        self._store, self._limit, self._is_given_up = store, limit, is_given_up

    def get(self, key: str) -> Any:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: Any, timeout: timedelta | None = None) -> None:
        end = time.monotonic() + (timeout or self._limit).total_seconds()
        while not self._store.check(keys):
            if self._is_given_up.is_set():
                raise RuntimeError("the run has failed meanwhile")
            if time.monotonic() > end:
                raise RuntimeError(f"{', '.join(keys)} did not come in time")
            time.sleep(_LOOK)

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def compare_set(self, key: str, expected: Any, desired: Any) -> Any:
        return self._store.compare_set(key, expected, desired)

    def add(self, key: str, value: int) -> int:
        return int(self._store.add(key, value))

    def check(self, keys: Any) -> bool:
        return bool(self._store.check(keys))

    def delete_key(self, key: str) -> bool:
        return bool(self._store.delete_key(key))


@functions.async_execution  # type: ignore[untyped-decorator]  # torch has no types for it
def _answer(request: str, arguments: tuple[Any, ...]) -> torch.futures.Future[Any]:
    """Answer a request, in the process that got it."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    try:
        value = _SERVICES[0].answer(request, arguments)
    except BaseException as error:  # noqa: BLE001 - for the peer
        future.set_result(_Failure(error))
        return future
    if isinstance(value, Future):
        value.add_done_callback(lambda done: future.set_result(_outcome(done)))
    else:
        future.set_result(value)
    return future


class _Failure:
    """An error, in place of an answer."""

    def __init__(self, error: BaseException) -> None:
        self.text = "".join(traceback.format_exception_only(error)).strip()
        self.trace = "".join(traceback.format_tb(error.__traceback__))


def _outcome(done: Future[Any]) -> Any:
    error = done.exception()
    return done.result() if error is None else _Failure(error)


def _take(done: torch.futures.Future[Any], answer: Future[Any]) -> None:
    """Pass the outcome of torch's future on, which cannot be waited for so that signals are seen."""
    try:
        value = done.value()
    except RuntimeError as error:
        answer.set_exception(ConnectionError(str(error)))
        return
    if isinstance(value, _Failure):
        failure = RequestError(value.text)
        failure.add_note(value.trace)
        answer.set_exception(failure)
    else:
        answer.set_result(value)


@lru_cache(maxsize=256)
def _packed(function: Callable[..., Any]) -> bytes:
    return pack(function)  # the peer cannot import the user's program


def _invoke(packed: bytes, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _unpacked(packed)(*args, **kwargs)


@lru_cache(maxsize=256)
def _unpacked(packed: bytes) -> Any:
    return unpack(packed)


def _flush() -> None:
    if sys.stderr is not None:  # as it is of a program that was started without
        sys.stderr.flush()


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Leave out what torch's agent prints of each peer when it ends; all else that is printed meanwhile comes after."""
    _flush()
    try:
        stream = os.dup(2)
    except OSError:  # closed, as a daemon's may be
        yield
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            _flush()
            os.dup2(stream, 2)
            os.close(stream)
            file.seek(0)
            for line in file:
                if b"tensorpipe_agent.cpp" not in line:
                    os.write(2, line)
