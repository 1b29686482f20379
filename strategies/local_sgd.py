"""LocalSGDStrategy: replicas train by themselves and are averaged every few steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Unpack

from torch import nn

from ..common.errors import ConfigError
from .cluster.hardware import Hardware
from .ddp import ReplicaStrategy
from .distributed.process_group import ProcessSettings
from .module.precision import Precision
from .parallel.ddp_options import DDPOptions
from .placed.local_sgd import PlacedLocalSGD


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

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        super().validate(hardware, precision)
        _check_period(self.period, self.ranks.environment.world_size)
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

    def make_placed(self, module: nn.Module, *, is_manual: bool = False) -> PlacedLocalSGD:
        self._convert(module)
        replicated = self._replicate(module, is_manual=is_manual, compares_frozen=False)  # these are not averaged
        return PlacedLocalSGD(self.site, module, *replicated, period=self.period, warmup_steps=self.warmup_steps)


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
