"""LocalSGDStrategy: replicas train by themselves and are averaged every few steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from ..common.errors import ConfigError
from .cluster.hardware import Hardware
from .ddp import ReplicaStrategy
from .distributed.process_group import ProcessSettings
from .module.precision import Precision
from .parallel.model_averaging import ModelAverage
from .parallel.replica import DDPOptions
from .parallel.replica_check import ReplicaCheck, ReplicaDifference
from .state.optimizer_state import needs_closure

_NUM_STEPS: Final = "local_sgd_steps"
"""The key of the step count in an optimizer's state."""


class LocalSGDStrategy(ReplicaStrategy):
    """Train as `DDPStrategy` does for `warmup_steps`; then let each replica take steps with its own gradients.

    Parameters are averaged over the ranks after the first step that follows the warm-up, and every `period` steps from
    then on. Before an evaluation, a checkpoint and the end of a run, parameters and optimizer states are averaged too,
    so that a resumed run equals one that never stopped; how often a run evaluates and saves thus changes its numbers.

    Steps are counted for each optimizer. The count continues from a checkpoint of this strategy, and starts at 0 from
    any other. A rank's loss is weighted by its number of samples, as in every strategy, and a rank without samples
    steps with gradients of 0: with plain SGD, averaged at every step, this equals DDP. Clipping, hooks and callbacks
    see their own rank's gradients and replica. Buffers are copied from rank 0 during the warm-up and before an
    evaluation, a checkpoint and the end. A callback that keeps weights (`WeightAveraging`) keeps those of its rank;
    rank 0's are saved.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", 2019; Lin et al., "Don't Use Large Mini-Batches,
    Use Local SGD", 2020 (the warm-up: post-local SGD).

    Args:
        period: optimizer steps between two averages. Or a mapping from periods to the number of neighboring ranks that
            are averaged, such as ``{2: 8, 16: 64}`` for 8 nodes of 8 GPUs; the longest period is for all ranks.
        warmup_steps: optimizer steps with gradients averaged over all ranks, before parameters are first averaged.
        ddp: how gradients are synchronized during the warm-up.
        settings: see `ProcessSettings`.

    Example::

        Trainer(strategy=LocalSGDStrategy(period=8, warmup_steps=100), devices=2)
    """

    name: ClassVar[str] = "local_sgd"
    needs_trainer: ClassVar[bool] = True
    can_try_steps: bool = False
    steps_alone: ClassVar[bool] = True

    def __init__(
        self,
        *,
        period: int | Mapping[int, int] = 4,
        warmup_steps: int = 0,
        ddp: DDPOptions | None = None,
        **settings: Unpack[ProcessSettings],
    ) -> None:
        super().__init__(ddp, **settings)
        self.period = period
        self.warmup_steps = warmup_steps
        self._averages: dict[Optimizer, ModelAverage] = {}
        self._has_diverged = False

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        super().validate(hardware, precision)
        _check_period(self.period, self.environment.world_size)
        if self.warmup_steps < 0:
            raise ConfigError(
                f"warmup_steps must be >= 0, got {self.warmup_steps}; give a number of steps, or 0 for none."
            )
        if precision.uses_scaler:
            raise ConfigError(
                f"strategy='local_sgd' does not work with precision={precision.name!r}, which skips steps whose "
                "gradients overflow: each rank would skip others; use 'bf16-mixed' or '32-true'."
            )
        if self.options.static_graph:
            raise ConfigError(
                f"strategy='local_sgd' does not work with static_graph={self.options.static_graph}, which needs the "
                "gradients of all ranks at every step; leave it out."
            )

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._averages, self._has_diverged = {}, False
        if self.ranks.group is None:
            return
        for optimizer in optimizers:
            if needs_closure(optimizer):
                raise ConfigError(
                    f"strategy='local_sgd' does not work with {type(optimizer).__name__}, which evaluates the loss a "
                    "number of times that depends on the gradients; use strategy='ddp', or another optimizer."
                )
            self._averages[optimizer] = ModelAverage(optimizer, self.period, self.warmup_steps)
        self._plan_step()

    def _plan_step(self) -> None:
        self._replica.averages_gradients = any(average.is_warming_up for average in self._averages.values())

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Step the optimizer, and average its parameters if that is due."""
        super().step(optimizer, closure)
        if optimizer in self._averages:
            self._has_diverged |= not self._replica.averages_gradients
            self._averages[optimizer].end_step()
            self._plan_step()

    def _make_check(self, module: nn.Module) -> ReplicaCheck:
        return ReplicaCheck(module, self.ranks.all, with_frozen=False)  # these are not averaged

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

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
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


def _check_period(period: int | Mapping[int, int], world_size: int) -> None:
    periods = [period] if isinstance(period, int) else sorted(period)
    if not periods or periods[0] < 1:
        raise ConfigError(
            f"period must be >= 1, got {period!r}; give the number of steps from one average to the next."
        )
    if isinstance(period, int) or world_size == 1:
        return
    sizes = [period[steps] for steps in periods]
    if sizes[-1] != world_size or any(size < 1 or world_size % size for size in sizes):
        raise ConfigError(
            f"period must average over numbers of ranks that divide world_size={world_size}, got {period!r}; give such "
            f"numbers, and {world_size} for the longest period."
        )
