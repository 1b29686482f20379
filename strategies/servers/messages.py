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
    """A server's share of an optimizer: some of its parameters, and their state."""

    optimizer: bytes
    """Its class and attributes, pickled: see `held.make_optimizer`."""
    groups: Sequence[dict[str, Any]]
    """Its groups, each with the names of this server's parameters."""
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
    """The number of earlier pushes of this trainer."""
    used: Sequence[bool]
    """Which of `Assignment.trained` have a gradient."""
    flats: Sequence[Tensor]
    rows: Mapping[str, Rows] = field(default_factory=dict)
    settings: Sequence[Mapping[str, Any]] | None = None
    """The groups' settings, as schedulers have left them; None if another trainer sends them."""
    is_final: bool = True
    """Whether to update at once, without waiting for an `Update`."""
    generator: Tensor | None = None
    """The state of torch's random generator, from which the optimizer draws; None for one that draws nothing."""


@dataclass(frozen=True)
class Update:
    """The request to update the parameters with the gathered gradients."""

    trainer: int
    step: int
    factor: float
    """Gradients are multiplied by it first."""
    limit: float | None = None
    """Each element is clipped to it."""
    generator: Tensor | None = None
    """As in a `Push`."""


@dataclass(frozen=True)
class Updated:
    """The parameters after an update."""

    flats: Sequence[Tensor]
    settings: Sequence[Mapping[str, Any]]
    """The settings of its groups that the optimizer has changed."""
    generator: Tensor | None = None
    """The state of the generator that was sent, after the update."""
    staleness: Sequence[float] = ()
    """In async mode, over all pushes of all trainers: their number, the sum and the largest lead over the slowest."""
