"""Estimates with parameter servers: what a trainer holds, what each server holds, and what goes between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from torch import nn

from ..module.memory_estimate import MemoryShare
from ..servers.flat_layout import deal_names
from ..servers.remote_embedding import RemoteEmbedding
from .estimate import Estimate, estimate_held, whole_activations
from .profile import Profile

_ID: Final = 4
"""The bytes of a row's index in a message."""
_GRADIENT_ID: Final = 8
"""The bytes of a row's index in a sparse gradient."""


class ServedStep:
    """A step in which servers hold all parameters, or only the tables of `RemoteEmbedding` layers.

    Each id of a micro-batch counts as a different row of its table; repeated ids make the real traffic smaller.

    Args:
        profile: of one micro-batch.
        serves_all: whether servers hold all parameters.
        num_trainers: the number of trainers.
        num_servers: the number of servers.
        is_async: whether each push is an update of its own.
    """

    def __init__(
        self, profile: Profile, *, serves_all: bool, num_trainers: int, num_servers: int, is_async: bool
    ) -> None:
        self._profile, self._serves_all = profile, serves_all
        self._num_trainers, self._num_servers, self._is_async = num_trainers, num_servers, is_async
        found = {n: part for n, part in profile.module.named_modules() if isinstance(part, RemoteEmbedding)}
        self._sparse = {layer.weight for layer in found.values() if layer.sparse}
        self._pulled_rows = {} if serves_all else _rows_of(profile, found)
        """Of a micro-batch, by table."""
        self._pushed_rows = {
            table: min(number * profile.num_micro_batches, table.shape[0])
            for table, number in self._pulled_rows.items()
        }
        """Of a step, by table."""

    # --- a trainer ---------------------------------------------------------------------------------------------------

    def of_trainer(self, dense: Callable[[Profile], Estimate], *, is_on_cpu: bool) -> Estimate:
        """Return the estimate of a trainer.

        Args:
            dense: returns the estimate of a trainer without servers, from the profile of a step without tables.
            is_on_cpu: whether the trainer computes where its messages are made.
        """
        profile, tables = self._profile, self._pushed_rows
        pushed, pulled = self._moved(profile.parameters)
        if self._serves_all:
            return estimate_held(
                profile,
                MemoryShare(optimizer=lambda _: 0.0),
                whole_activations(profile),
                # trainer 0 compares its parameters with those that the servers have
                communication=0.0 if self._is_async else pulled,
                between_steps=pushed + pulled if is_on_cpu else 0.0,  # a message and its answer
                traffic={"servers": pushed + pulled},
            )
        state = {parameter: size for parameter, size in profile.state.items() if parameter not in tables}
        unused = profile.unused - tables.keys()
        estimate = dense(replace(profile, trained=profile.trained - tables.keys(), unused=unused, state=state))
        gradients = sum(rows * (_row_bytes(table) + _GRADIENT_ID) for table, rows in tables.items())
        return replace(
            estimate,
            parameters=estimate.parameters - sum(table.nbytes for table in tables),
            gradients=estimate.gradients + gradients,
            traffic={**estimate.traffic, "servers": pushed + pulled},
        )

    def _moved(self, held: Sequence[nn.Parameter]) -> tuple[float, float]:
        """Return the bytes of these parameters that a trainer pushes and pulls in a step."""
        if self._serves_all:
            trained = float(sum(parameter.nbytes for parameter in held if parameter.requires_grad))
            return trained, trained
        tables = [parameter for parameter in held if parameter in self._pulled_rows]
        pushed = sum(self._pushed_rows[table] * (_row_bytes(table) + _ID) for table in tables)
        pulled = sum(self._pulled_rows[table] * (_row_bytes(table) + _ID) for table in tables)
        return pushed, pulled * self._profile.num_micro_batches

    # --- servers -----------------------------------------------------------------------------------------------------

    def of_servers(self) -> list[Estimate]:
        """Return the estimate of each server, which is on the CPU; its traffic is with all trainers together."""
        named = self.served
        sizes = {name: parameter.nbytes for name, parameter in named.items()}
        return [self._of_server([named[name] for name in names]) for names in deal_names(sizes, self._num_servers)]

    @property
    def served(self) -> dict[str, nn.Parameter]:
        """The parameters that servers hold, by name."""
        named = self._profile.module.named_parameters()
        return {name: parameter for name, parameter in named if self._serves_all or parameter in self._pulled_rows}

    def _of_server(self, held: Sequence[nn.Parameter]) -> Estimate:
        own, profile = set(held), self._profile
        pushed, pulled = self._moved(held)
        rows_only = set() if self._serves_all else self._sparse  # other optimizers get a table's whole gradient
        gradients = float(sum(p.nbytes for p in held if p.requires_grad and p not in rows_only))
        # gradients wait for those of the last trainer; in async mode each answer is a separate copy
        waiting = pushed + pulled if self._is_async else pushed
        return Estimate(
            parameters=float(sum(parameter.nbytes for parameter in held)),
            gradients=gradients,
            optimizer=profile.state_bytes(lambda parameter: float(parameter in own)),
            activations=0.0,
            communication=self._num_trainers * waiting,
            workspace=profile.update_bytes * gradients / max(1, sum(p.nbytes for p in profile.trained)),
            traffic={"servers": self._num_trainers * (pushed + pulled)},
        )


def _rows_of(profile: Profile, layers: Mapping[str, RemoteEmbedding]) -> dict[nn.Parameter, float]:
    """Return how many rows of each table a micro-batch uses, at most."""
    tables = {name: layer.get_parameter("weight") for name, layer in layers.items()}
    rows = dict.fromkeys(tables.values(), 0.0)
    for name, table in tables.items():
        use = profile.layers.get(name)
        if use is not None:
            rows[table] += use.num_calls * min(use.output_bytes / _row_bytes(table), table.shape[0])
    return rows


def _row_bytes(table: nn.Parameter) -> int:
    return table.nbytes // max(1, table.shape[0])
