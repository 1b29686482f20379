"""ServerChoices: the user's choices for parameter servers, and which of them go together."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from ...common.errors import ConfigError, did_you_mean
from ..cluster.environment import Environment
from .meeting import private_address


@dataclass(frozen=True)
class ServerChoices:
    """Arguments of ``ParameterServerStrategy``, which explains them."""

    servers: int | Literal["nodes"]
    mode: Literal["sync", "async"]
    max_staleness: int | None
    dense: Literal["servers", "ddp"]
    answer_timeout: timedelta

    @property
    def serves_all(self) -> bool:
        """Whether servers hold all parameters, not only tables."""
        return self.dense == "servers"

    def number_on(self, num_nodes: int) -> int:
        """Return the number of servers, on all nodes."""
        return num_nodes if self.servers == "nodes" else self.servers

    @property
    def bound(self) -> int | None:
        """How many steps a trainer may be ahead of the slowest; None if trainers step together."""
        return self.max_staleness if self.mode == "async" and self.max_staleness else None

    def validate(self, environment: Environment, *, uses_scaler: bool) -> None:
        """Check the choices, in the caller's process.

        Raises:
            ConfigError: for choices that are not possible.
        """
        is_number = isinstance(self.servers, int) and not isinstance(self.servers, bool)
        if self.servers != "nodes" and not (is_number and int(self.servers) >= 1):
            raise ConfigError(
                f"servers must be >= 1, or 'nodes' for one on each node, got {self.servers!r}; use strategy='ddp' to "
                "train without servers."
            )
        for name, value, known in (("mode", self.mode, ("sync", "async")), ("dense", self.dense, ("servers", "ddp"))):
            if value not in known:
                hint = did_you_mean(str(value), known)
                raise ConfigError(f"{name} must be {known[0]!r} or {known[1]!r}, got {value!r}.{hint}")
        if not isinstance(self.answer_timeout, timedelta) or self.answer_timeout <= timedelta(0):
            raise ConfigError(
                f"answer_timeout must be a timedelta above zero, got {self.answer_timeout!r}; give "
                "timedelta(seconds=10), for example."
            )
        self._check_staleness(uses_scaler=uses_scaler)
        if environment.num_nodes > 1:
            with suppress(OSError):  # it may be unknown where a run is only planned; its ranks would report it
                private_address(environment.main_address)

    def check_number(self, num_servers: int, num_tensors: int) -> None:
        """Check that each server gets a tensor.

        Raises:
            ConfigError: if there are too few.
        """
        if num_servers <= max(num_tensors, 1) and (num_tensors or self.serves_all):
            return
        what = "parameter tensors" if self.serves_all else "tables of RemoteEmbedding"
        raise ConfigError(
            f"servers must be at most the number of {what}, got {num_servers} for {num_tensors}; use fewer servers"
            + ("." if self.serves_all else ", or strategy='ddp', which needs none.")
        )

    def _check_staleness(self, *, uses_scaler: bool) -> None:
        if self.mode == "sync":
            if self.max_staleness is not None:
                raise ConfigError(
                    f"max_staleness={self.max_staleness!r} needs mode='async': in sync mode no trainer gets ahead of "
                    "another; leave it out, or set mode='async'."
                )
            return
        if type(self.max_staleness) is not int or self.max_staleness < 0:
            raise ConfigError(
                f"max_staleness must be >= 0 in async mode, got {self.max_staleness!r}; give the number of steps that "
                "a trainer may be ahead of the slowest, such as 4."
            )
        if self.bound is None:
            return
        if self.dense == "ddp":
            raise ConfigError(
                "dense='ddp' needs mode='sync', got 'async': all-reduce makes trainers wait for each other at each "
                "step; leave out dense or mode."
            )
        if uses_scaler:
            raise ConfigError(
                "mode='async' does not work with precision='16-mixed', in which all trainers skip a step together; "
                "use 'bf16-mixed' or '32-true'."
            )
