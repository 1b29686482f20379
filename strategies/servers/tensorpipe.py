"""TensorPipe, torch's transport for remote calls: everything of it that Echelon uses. torch no longer develops it.

Every peer can call any function in every other, so whoever can connect can run anything; see `meeting` for who can.
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

from ...common.errors import ConfigError, RunError
from ..cluster.environment import overriding_variables
from ..distributed.pickling import PICKLING_ERRORS, pack_value, unpack_value
from ..torch_internals.distributed import is_rpc_initialized, join_rpc, make_rpc_options
from .transport import Arguments, Peers, RequestError, Service

_LOOK: Final = 0.01  # seconds between two checks of the store

_SERVICES: Final[list[Service]] = []
"""The service of this process, while it is a peer: torch has one agent per process."""


class TensorPipe:
    """This process as a peer of a run. Collective: all peers create one, at the same time.

    Args:
        name: its name.
        peers: all peers of the run.
        store: a torch store that all peers share.
        service: answers the requests of the others.
        interface: environment variables that say on which network it listens.
        start_timeout: how long to wait for the others.
        is_given_up: once another thread sets it, the others are no longer waited for.

    Raises:
        RunError: if this process has called ``torch.distributed.rpc.init_rpc`` itself.
        ConnectionError: if peers do not join, or are lost.
    """

    def __init__(
        self,
        name: str,
        peers: Peers,
        store: Store,
        service: Service,
        *,
        interface: Mapping[str, str],
        start_timeout: timedelta,
        is_given_up: threading.Event,
    ) -> None:
        self._peers = peers
        rank = peers.names.index(name)
        options = make_rpc_options(start_timeout.total_seconds())
        if _SERVICES or is_rpc_initialized():
            raise RunError(
                "torch.distributed.rpc must not be initialized before a fit with parameter servers, found that it is; "
                "remove init_rpc, and call peers by trainer.strategy.rpc_sync."
            )
        _SERVICES.append(service)
        self._store = _PatientStore(store, start_timeout, is_given_up)  # torch does not keep it alive
        try:
            with warnings.catch_warnings(), overriding_variables(interface):
                warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch's own use of it
                join_rpc(self._internal(name), rank, len(peers.names), self._store, options)
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception):
                raise
            # torch raises errors of several types, and one error hides another while torch logs it
            raise ConnectionError(str(error.__context__ or error)) from error

    def _internal(self, name: str) -> str:
        # torch counts its barriers by the names of the peers, so each run in a process needs names of its own
        return f"{name}-{self._peers.token}"

    def call(self, peer: str, request: str, *arguments: object, timeout: float = 0) -> Future[Any]:
        """Send a request; see `Transport`."""
        answer: Future[object] = Future()
        try:
            future = rpc.rpc_async(self._internal(peer), _answer_request, (request, arguments), timeout=timeout)
        except RuntimeError as error:
            answer.set_exception(ConnectionError(str(error)))
        else:
            future.add_done_callback(lambda done: _pass_on_outcome(done, answer))
        return answer

    def invoke(
        self, how: str, peer: str, function: Callable[..., object], arguments: Arguments, timeout: float
    ) -> object:
        """Call a function of the user's in a peer; see `Transport`."""
        call: Any = rpc.remote if how == "remote" else rpc.rpc_async
        packed = _pack_function(function) if isinstance(function, Hashable) else pack_value(function)
        sent = packed, arguments.args, dict(arguments.kwargs)
        try:
            result = call(self._internal(peer), _invoke_packed, sent, timeout=timeout)
        except PICKLING_ERRORS as error:  # by torch, before anything is sent
            raise ConfigError(
                f"The arguments cannot be sent to {peer}: {error}; give tensors, numbers, lists, references and "
                "functions that can be imported, and create other objects inside the function."
            ) from error
        return result.wait() if how == "sync" else result

    def close(self) -> None:
        """Leave the others; see `Transport`.

        torch's graceful shutdown would wait for a peer that is gone, and counts shutdowns by process: a server that has
        just been started has seen fewer than its trainers.
        """
        try:
            with (
                _without_warnings(),
                suppress(RuntimeError),
            ):  # no agent yet, or the user still holds a reference to an object in a peer
                rpc.shutdown(graceful=False)
        finally:
            _SERVICES.clear()


class _PatientStore(Store):
    """A store whose waits let other threads run.

    torch's agent asks for the names of its peers while holding the GIL: a peer that died just before would
    stop all threads of this process for as long as the store waits.
    """

    def __init__(self, store: Store, limit: timedelta, is_given_up: threading.Event) -> None:
        super().__init__()
        self._store, self._limit, self._is_given_up = store, limit, is_given_up

    def get(self, key: str) -> Any:
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: Any, timeout: timedelta | None = None) -> None:
        end = time.monotonic() + (timeout or self._limit).total_seconds()
        while not self._store.check(keys):
            if self._is_given_up.is_set():
                raise RuntimeError("the run has failed in the meantime")
            if time.monotonic() > end:
                raise RuntimeError(f"{', '.join(keys)} did not arrive in time")
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
def _answer_request(request: str, arguments: tuple[object, ...]) -> torch.futures.Future[object]:
    """Answer a request, in the process that received it."""
    future: torch.futures.Future[object] = torch.futures.Future()
    try:
        value = _SERVICES[0].answer(request, arguments)
    except BaseException as error:  # noqa: BLE001 - passed on to the peer
        future.set_result(_Failure(error))
        return future
    if isinstance(value, Future):
        value.add_done_callback(lambda done: future.set_result(_get_outcome(done)))
    else:
        future.set_result(value)
    return future


class _Failure:
    """An error that takes the place of an answer."""

    def __init__(self, error: BaseException) -> None:
        self.text = "".join(traceback.format_exception_only(error)).strip()
        self.trace = "".join(traceback.format_tb(error.__traceback__))


def _get_outcome(done: Future[object]) -> object:
    error = done.exception()
    return done.result() if error is None else _Failure(error)


def _pass_on_outcome(done: torch.futures.Future[object], answer: Future[object]) -> None:
    """Pass on the outcome of torch's future, on which one cannot wait and still handle signals."""
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
def _pack_function(function: Callable[..., object]) -> bytes:
    return pack_value(function)  # the peer cannot import the user's program


def _invoke_packed(packed: bytes, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    return _unpack_function(packed)(*args, **kwargs)


@lru_cache(maxsize=256)
def _unpack_function(packed: bytes) -> Any:
    return unpack_value(packed)


def _flush_stderr() -> None:
    if sys.stderr is not None:  # it is None in a program that was started without one
        sys.stderr.flush()


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Drop what torch's agent prints about each peer as it ends; any other output of that time comes afterwards."""
    _flush_stderr()
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
            _flush_stderr()
            os.dup2(stream, 2)
            os.close(stream)
            file.seek(0)
            for line in file:
                if b"tensorpipe_agent.cpp" not in line:
                    os.write(2, line)
