"""PlacedLocalSGD: replicas of a module that train by themselves and are averaged every few steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from ...common.errors import ConfigError
from ..parallel.model_averaging import ModelAverage
from ..parallel.replica import Replica
from ..parallel.replica_check import ReplicaCheck, ReplicaDifference
from ..state.optimizer_state import needs_closure
from .placed import Site
from .replica import PlacedReplica

_NUM_STEPS: Final = "local_sgd_steps"
"""The key of the step count in an optimizer's state."""


class PlacedLocalSGD(PlacedReplica):
    """A replica of the module that is averaged with the others.

    Args:
        site: where it lies.
        module: the module.
        replica: synchronizes the gradients during the warm-up.
        check: compares the replicas.
        period: optimizer steps between two averages; see `LocalSGDStrategy`.
        warmup_steps: optimizer steps before parameters are first averaged.
    """

    def __init__(
        self,
        site: Site,
        module: nn.Module,
        replica: Replica,
        check: ReplicaCheck | None,
        *,
        period: int | Mapping[int, int],
        warmup_steps: int,
    ) -> None:
        super().__init__(site, module, replica, check)
        self._period, self._warmup_steps = period, warmup_steps
        self._averages: dict[Optimizer, ModelAverage] = {}
        self._has_diverged = False

    def take_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._averages, self._has_diverged = {}, False
        if self.ranks.group is None:
            return
        for optimizer in optimizers:
            if needs_closure(optimizer):
                raise ConfigError(
                    f"strategy='local_sgd' does not work with {type(optimizer).__name__}, which evaluates the loss a "
                    "number of times that depends on the gradients; use strategy='ddp', or another optimizer."
                )
            self._averages[optimizer] = ModelAverage(optimizer, self._period, self._warmup_steps)
        self._plan_step()

    def _plan_step(self) -> None:
        self._replica.averages_gradients = any(average.is_warming_up for average in self._averages.values())

    def step(self, optimizer: Optimizer, closure: Callable[[], object] | None = None) -> object:
        """Step the optimizer, and average its parameters if that is due."""
        loss = super().step(optimizer, closure)
        if optimizer in self._averages:
            self._has_diverged |= not self._replica.averages_gradients
            self._averages[optimizer].end_step()
            self._plan_step()
        return loss

    def sync_replicas(self, *, only_compares: bool = False, with_buffers: bool = False) -> ReplicaDifference | None:
        """Average the replicas and optimizer states, and copy rank 0's buffers. Collective: every rank calls it."""
        if self._has_diverged:
            if only_compares:
                return None
            self._average()
        return super().sync_replicas(only_compares=only_compares, with_buffers=with_buffers)

    def _average(self) -> None:
        self._has_diverged = False
        for average in self._averages.values():
            own = average.tensors()
            # a rank has no optimizer state for parameters that it has never used
            names = set.intersection(*map(set, self.ranks.all.all_gather_object(list(own))))
            common = [tensor for name, tensor in own.items() if name in names]
            with torch.no_grad():
                for tensor, mean in zip(common, self.ranks.all.all_reduce(common, "mean"), strict=True):
                    tensor.copy_(mean)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, object]:
        """Return the optimizer's state, with parameters by name, and its number of steps."""
        state = super().optimizer_state(optimizer)
        average = self._averages.get(optimizer)
        return state if average is None else {**state, _NUM_STEPS: average.num_steps}

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load what any strategy's `optimizer_state` returned; a state without a step count starts at 0."""
        super().load_optimizer_state(optimizer, state)
        if optimizer in self._averages:
            self._averages[optimizer].num_steps = state.get(_NUM_STEPS, 0)
            self._has_diverged = False  # the loaded state is equal on all ranks, and so are the weights
            self._plan_step()
