"""RemoteCalls: the user's functions, run by a trainer in other processes of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...common.errors import ConfigError, RunError
from .connection import Connection
from .transport import Arguments


class RemoteCalls:
    """The remote calls of a strategy with servers, for as long as it is connected to them."""

    @property
    def _connection(self) -> Connection | None:
        """While a fit is running; a strategy with servers overrides it."""
        return None

    def rpc_sync(
        self,
        to: str,
        func: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        timeout: float = 0,
    ) -> Any:
        """Return what a function returns in another process: ``"server0"``, ``"trainer1"``, ...

        It may be defined anywhere; see ``torch.distributed.rpc``. From ``on_fit_start`` to the end of a fit.

        Raises:
            RunError: outside of a fit.
            ConfigError: for a peer that is not there, and for arguments that cannot be sent to one.
        """
        return self._call("sync", to, func, args, kwargs, timeout)

    def rpc_async(
        self,
        to: str,
        func: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        timeout: float = 0,
    ) -> Any:
        """Call a function as `rpc_sync` does, and return a ``torch.futures.Future`` of its result."""
        return self._call("async", to, func, args, kwargs, timeout)

    def remote(
        self,
        to: str,
        func: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        timeout: float = 0,
    ) -> Any:
        """Call a function, or a class, and return torch's ``RRef`` to the result, which stays in the other process."""
        return self._call("remote", to, func, args, kwargs, timeout)

    def _call(
        self,
        how: str,
        to: str,
        func: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object] | None,
        timeout: float,
    ) -> object:
        if self._connection is None:
            name = "remote" if how == "remote" else f"rpc_{how}"
            raise RunError(
                f"strategy.{name} needs a running fit, found none; call it between on_fit_start and on_fit_end."
            )
        _check_call(func, args, kwargs, timeout)
        return self._connection.invoke(how, to, func, Arguments(tuple(args), kwargs or {}), timeout)


def _check_call(func: object, args: object, kwargs: object, timeout: object) -> None:
    """Check what a user gives for a call, of which the other process would complain, or torch.

    Raises:
        ConfigError: for what cannot be called so.
    """
    if not callable(func):
        raise ConfigError(
            f"func must be a function or a class, got {func!r:.60}; give the function itself, and its arguments as "
            "args."
        )
    if not isinstance(args, tuple | list):  # the rows of a tensor would be arguments, and the letters of a string
        raise ConfigError(f"args must be a tuple of arguments, got {args!r:.60}; write (value,) for a single one.")
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise ConfigError(f"kwargs must be a dict of arguments by name, got {kwargs!r:.60}; give {{'name': value}}.")
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise ConfigError(
            f"timeout must be a number of seconds, or 0 for no limit, got {timeout!r:.60}; give 5.0, for example."
        )
