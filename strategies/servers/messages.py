"""Messages between trainers and servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Gradients of some rows of a table, each row once."""

    ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class Assignment:
    """What a server holds of an optimizer: some of its parameters, and their state."""

    optimizer: bytes
    """Its class and attributes, pickled: see `held.make_optimizer`."""
    groups: Sequence[dict[str, Any]]
    """Its groups, with those parameters by name that are this server's."""
    trained: Sequence[str]
    """The parameters that are pushed and pulled whole, in the order of the flat tensors."""
    sparse: frozenset[str]
    """The tables whose gradients the optimizer gets as sparse tensors."""
    values: Mapping[str, Tensor]
    state: Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Push:
    """The gradients of a trainer in a step, for one server."""

    trainer: int
    step: int
    """How many pushes this trainer has made before."""
    used: Sequence[bool]
    """Which of `Assignment.trained` have a gradient."""
    flats: Sequence[Tensor]
    rows: Mapping[str, Rows] = field(default_factory=dict)
    settings: Sequence[Mapping[str, Any]] | None = None
    """Those of the groups, as schedulers have left them; None if another trainer sends them."""
    is_final: bool = True
    """Whether the update follows at once, and not an `Update`."""


@dataclass(frozen=True)
class Update:
    """The request to update the parameters with the gradients that have met."""

    trainer: int
    step: int
    factor: float
    """By which gradients are multiplied first."""
    limit: float | None = None
    """To which each element is clipped."""


@dataclass(frozen=True)
class Updated:
    """The parameters after an update."""

    flats: Sequence[Tensor]
    settings: Sequence[Mapping[str, Any]]
    """What the optimizer has changed in its groups."""
    staleness: Sequence[float] = ()
    """In async mode, over all pushes of all trainers: their number, the sum and the largest lead over the slowest."""
