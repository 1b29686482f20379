"""RemoteCalls: functions of the user's that a trainer runs in other processes of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import RunError
from .connection import Connection
from .transport import Arguments


class RemoteCalls:
    """The remote calls of a strategy with servers, for as long as it is connected with them."""

    _connection: Connection | None = None
    """While a fit goes on."""

    def rpc_sync(
        self,
        to: str,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = 0,
    ) -> Any:
        """Return what a function returns in another process: ``"server0"``, ``"trainer1"``, ...

        It may be defined anywhere; see ``torch.distributed.rpc``. From ``on_fit_start`` to the end of a fit.

        Raises:
            RunError: outside of a fit.
            ConfigError: for a peer that is not there.
        """
        return self._call("sync", to, func, args, kwargs, timeout)

    def rpc_async(
        self,
        to: str,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = 0,
    ) -> Any:
        """Call a function as `rpc_sync` does, and return a ``torch.futures.Future`` of its result."""
        return self._call("async", to, func, args, kwargs, timeout)

    def remote(
        self,
        to: str,
        func: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float = 0,
    ) -> Any:
        """Call a function, or a class, and return torch's ``RRef`` to the result, which stays in the other process."""
        return self._call("remote", to, func, args, kwargs, timeout)

    def _call(
        self,
        how: str,
        to: str,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        timeout: float,
    ) -> Any:
        if self._connection is None:
            name = "remote" if how == "remote" else f"rpc_{how}"
            raise RunError(
                f"strategy.{name} needs a fit that goes on, found none; call it between on_fit_start and on_fit_end."
            )
        return self._connection.invoke(how, to, func, Arguments(tuple(args), kwargs or {}), timeout)
