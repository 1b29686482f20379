"""LocalSGDStrategy: replicas train by themselves and become their mean every some steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Unpack

import torch
from torch.optim import Optimizer

from .cluster.hardware import Hardware
from .distributed.process_group import ProcessSettings
from .errors import ConfigError
from .module.precision import Precision
from .parallel.model_averaging import ModelAverage
from .parallel.replica import DDPOptions
from .replicated import ReplicaStrategy
from .state.optimizer_state import needs_closure

_NUM_STEPS: Final = "local_sgd_steps"
"""Under what a checkpoint holds, with an optimizer's state, the number of its steps."""


class LocalSGDStrategy(ReplicaStrategy):
    """Train as `DDPStrategy` does for `warmup_steps`; then let each replica make steps with its own gradients.

    After the first step behind the warm-up, and every `period` steps from there, parameters become their mean over the
    ranks. They do so too before an evaluation, a checkpoint and the end of a run, and there the optimizers' states as
    well, so that a resumed run goes on like one that never stopped; their interval is part of what is computed.

    Steps are counted for each optimizer, and go on with a checkpoint of this strategy; one of another begins them anew.
    A rank's loss is weighted by its share of the samples, as for every strategy, and a rank without samples steps with
    gradients of 0: so with plain SGD, averaged at every step, this is DDP. Clipping, hooks and callbacks see the
    gradients and the replica of their rank. Buffers become rank 0's in the warm-up, and at those three occasions. What
    a callback keeps of the weights (`WeightAveraging`) is of its rank, and rank 0's is saved.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", 2019; Lin et al., "Don't Use Large Mini-Batches,
    Use Local SGD", 2020 (the warm-up: post-local SGD).

    Args:
        period: optimizer steps from one average to the next. Or periods, each with the number of neighbouring ranks
            that average then, such as ``{2: 8, 16: 64}`` for 8 GPUs a node on 8 nodes; the longest is for all ranks.
        warmup_steps: optimizer steps with the gradients of all ranks, before that.
        ddp: how gradients are synchronised in these.
        settings: those of the processes, see `ProcessSettings`.
    """

    name: ClassVar[str] = "local_sgd"

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
            raise ConfigError(f"warmup_steps={self.warmup_steps} is not possible; give 0, or a number of steps.")
        if precision.uses_scaler:
            raise ConfigError(
                f"precision={precision.name!r} leaves out steps whose gradients overflow, which with "
                "strategy='local_sgd' would be others on each rank; use 'bf16-mixed' or '32-true'."
            )
        if self.options.static_graph:
            raise ConfigError(
                f"static_graph={self.options.static_graph} needs gradients of all ranks at every step, which "
                "strategy='local_sgd' has not; leave it out."
            )

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._averages, self._has_diverged = {}, False
        if self.group is None:
            return
        for optimizer in optimizers:
            if needs_closure(optimizer):
                raise ConfigError(
                    f"strategy='local_sgd' cannot average {type(optimizer).__name__}, which evaluates the loss as "
                    "often as each rank's own gradients make it; use strategy='ddp', or another optimizer."
                )
            self._averages[optimizer] = ModelAverage(optimizer, self.period, self.warmup_steps)
        self._plan_step()

    def _plan_step(self) -> None:
        self._replica.synchronises = any(average.is_warming_up for average in self._averages.values())

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> None:
        """Update the parameters of `optimizer`, and average them if that is due."""
        super().step(optimizer, closure)
        if optimizer in self._averages:
            self._has_diverged |= not self._replica.synchronises
            self._averages[optimizer].end_step()
            self._plan_step()

    def sync_replicas(self) -> None:
        """Make the replicas their mean, optimizers included, with rank 0's buffers. Collective: every rank calls it."""
        super().sync_replicas()
        if not self._has_diverged:
            return
        self._has_diverged = False
        for average in self._averages.values():
            mine = average.tensors()
            # a rank lacks the state of a parameter that it has never used
            shared = set.intersection(*map(set, self.all_gather_object(list(mine))))
            common = [tensor for name, tensor in mine.items() if name in shared]
            with torch.no_grad():
                for tensor, mean in zip(common, self.all_reduce(common, "mean"), strict=True):
                    tensor.copy_(mean)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state with parameters by name, and the number of its steps."""
        state = super().optimizer_state(optimizer)
        average = self._averages.get(optimizer)
        return state if average is None else {**state, _NUM_STEPS: average.num_steps}

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load what `optimizer_state` of any strategy returned; without a number of steps, they begin anew."""
        super().load_optimizer_state(optimizer, state)
        if optimizer in self._averages:
            self._averages[optimizer].num_steps = state.get(_NUM_STEPS, 0)
            self._has_diverged = False  # what is loaded is equal on all ranks, with the weights
            self._plan_step()


def _check_period(period: int | Mapping[int, int], world_size: int) -> None:
    periods = [period] if isinstance(period, int) else sorted(period)
    if not periods or periods[0] < 1:
        raise ConfigError(f"period={period!r} is not possible; give at least 1, the number of steps between averages.")
    if isinstance(period, int) or world_size == 1:
        return
    sizes = [period[one] for one in periods]
    if sizes[-1] != world_size or any(size < 1 or world_size % size for size in sizes):
        raise ConfigError(
            f"period={period!r} averages over {sizes} ranks, but there are {world_size}; give numbers that divide "
            f"{world_size}, and {world_size} for the longest period."
        )
