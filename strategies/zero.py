"""ZeroStrategy: every process trains a replica of the module and keeps a shard of the optimizer state."""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch import nn

from .ddp import ReplicaStrategy
from .distributed.process_group import ProcessSettings
from .parallel.ddp_options import DDPOptions
from .placed.zero import PlacedZero
from .state.shared_memory import check_unshared
from .strategy import MicroBatches


class ZeroStrategy(ReplicaStrategy):
    """Train as `DDPStrategy` does, with optimizer state sharded over the ranks: each keeps about 1/world_size of it.

    It works with any optimizer that updates each parameter independently. Every rank updates the parameters whose state
    it keeps and sends them to the others. Checkpoints are the same as any other strategy's; each rank writes its shard.

    Args:
        ddp: how gradients are synchronized.
        settings: see `ProcessSettings`.

    Example::

        Trainer(strategy="zero", devices=2)
    """

    name: ClassVar[str] = "zero"
    supports_restarts: bool = True

    def __init__(self, *, ddp: DDPOptions | None = None, **settings: Unpack[ProcessSettings]) -> None:
        super().__init__(ddp, **settings)

    def validate_module(
        self, module: nn.Module, *, trains: bool = True, micro_batches: MicroBatches = "unknown"
    ) -> None:
        super().validate_module(module, trains=trains, micro_batches=micro_batches)
        if self.ranks.environment.world_size > 1:
            check_unshared(module, self.name, with_buffers=False)

    def make_placed(self, module: nn.Module, *, is_manual: bool = False) -> PlacedZero:
        self.validate_module(module, trains=False)  # with what configure_model has built
        self._convert(module)
        return PlacedZero(self.site, module, *self._replicate(module, is_manual=is_manual))
