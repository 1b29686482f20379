"""PlacedZero: replicas of a module in which each process keeps the optimizer state of some parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..module.memory_estimate import MemoryShare
from ..parallel.optimizer_probe import OptimizerProbe, check_can_be_dealt
from ..parallel.replica import Replica
from ..parallel.replica_check import ReplicaCheck
from ..parallel.sharded_optimizer import ShardedOptimizer
from ..state.optimizer_state import Sharded, parameter_names
from ..state.sendable import check_lookups
from .placed import Site
from .replica import PlacedReplica


class PlacedZero(PlacedReplica):
    """A replica of the module, with a shard of the optimizer state. The arguments are those of `PlacedReplica`."""

    def __init__(self, site: Site, module: nn.Module, replica: Replica, check: ReplicaCheck | None) -> None:
        super().__init__(site, module, replica, check)
        self._sharded: dict[Optimizer, ShardedOptimizer] = {}

    @property
    def memory_share(self) -> MemoryShare:
        return MemoryShare(optimizer=lambda _: 1 / self.ranks.world_size)

    def take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._sharded = {}
        if self.ranks.group is None:
            return
        check_lookups(self.module, self.site.name)  # with what configure_model has built
        for optimizer in optimizers:
            check_can_be_dealt(OptimizerProbe(optimizer), self.site.name, self.ranks.all)
        self._sharded = {optimizer: ShardedOptimizer(optimizer) for optimizer in optimizers}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, object]:
        """Return the state of the parameters that this rank owns, by name, and the param groups of all parameters."""
        state = super().optimizer_state(optimizer)
        return {**state, "state": Sharded(state["state"])} if optimizer in self._sharded else state

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load the entries that this rank owns from the full state, saved by any strategy."""
        if optimizer in self._sharded:
            own = self._own_names(optimizer)
            state = {**state, "state": {name: value for name, value in state["state"].items() if name in own}}
        super().load_optimizer_state(optimizer, state)

    def _own_names(self, optimizer: Optimizer) -> set[str]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        named = zip(parameter_names(optimizer, self.module), parameters, strict=True)
        return {name for name, parameter in named if self._sharded[optimizer].owns(parameter)}
