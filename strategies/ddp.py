"""DDPStrategy: every process trains a replica of the module; gradients are averaged in buckets during backward."""

from __future__ import annotations

from typing import ClassVar, Unpack

from torch import nn

from .cluster.hardware import Hardware
from .distributed.process_group import ProcessSettings
from .module.precision import Precision
from .parallel.ddp_options import CommHook, Compression, DDPOptions
from .parallel.replica import Replica
from .parallel.replica_check import ReplicaCheck
from .placed.placed import Placed
from .placed.replica import PlacedReplica
from .state.sendable import check_lookups, check_sendable, check_shapes
from .strategy import MicroBatches, Strategy


class ReplicaStrategy(Strategy):
    """Train a `Replica` of the module in each process; subclasses differ in the optimizer step.

    Args:
        options: how gradients are synchronized.
        settings: see `ProcessSettings`.
    """

    uses_processes: ClassVar[bool] = True
    uses_many_devices: ClassVar[bool] = True

    def __init__(self, options: DDPOptions | None = None, **settings: Unpack[ProcessSettings]) -> None:
        super().__init__(**settings)
        self.options = options or DDPOptions()
        self.can_try_steps = self.can_try_steps and self.options.comm_hook in (None, "fp16", "bf16")  # without a state

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        super().validate(hardware, precision)
        self.options.validate(hardware.device_type)

    def validate_module(
        self, module: nn.Module, *, trains: bool = True, micro_batches: MicroBatches = "unknown"
    ) -> None:
        if self.ranks.environment.world_size > 1:
            check_sendable(module, self.name)
            if trains:
                check_lookups(module, self.name)

    def make_placed(self, module: nn.Module, *, is_manual: bool = False) -> Placed:
        self._convert(module)
        return PlacedReplica(self.site, module, *self._replicate(module, is_manual=is_manual))

    def _convert(self, module: nn.Module) -> None:
        if self.ranks.group is not None:
            check_shapes(module)  # with what configure_model has built
            check_sendable(module, self.name)
        self.precision.convert_module(module, self.device)

    def _replicate(
        self, module: nn.Module, *, is_manual: bool, compares_frozen: bool = True, averages: bool = True
    ) -> tuple[Replica, ReplicaCheck | None]:
        """Make replicas equal; return what averages their gradients, and what compares them.

        Without `averages`, torch's DDP is not used, and gradients stay those of each rank: the `Placed` averages them.
        """
        if self.ranks.group is None:
            return Replica(module, None, self.options, is_manual=is_manual), None
        replica = Replica(module, self.ranks.all, self.options, is_manual=is_manual or not averages)
        replica.averages_gradients = averages
        return replica, ReplicaCheck(module, self.ranks.all, with_frozen=compares_frozen)


class DDPStrategy(ReplicaStrategy):
    """Train with torch's ``DistributedDataParallel``: each process reads its slice of every global batch.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020. In manual
    optimization, gradients are averaged at the end of each ``manual_backward`` instead, and DDP is not used.

    Args:
        find_unused_parameters: for a module in which some parameters get no gradient in some steps; walks the autograd
            graph of every step.
        static_graph: promise that every step uses the same parameters; then unused ones cost nothing.
        gradient_as_bucket_view: let gradients be views of the communication buckets, which saves a copy of them all.
        bucket_cap_mb: the size of a bucket; by default torch's 25 MB.
        comm_hook: how gradients are compressed: ``"fp16"``, ``"bf16"`` or ``"powersgd"`` (rank 4, after 1000 steps), or
            the state and function of a DDP communication hook. Compression is lossy: it changes the numbers.
        sync_batchnorm: compute batch norm statistics over all ranks (GPUs only, as in torch).
        broadcast_buffers: copy rank 0's buffers to all ranks before each step.
        settings: see `ProcessSettings`.

    Example::

        Trainer(strategy="ddp", devices=2)
        Trainer(strategy=DDPStrategy(find_unused_parameters=True, comm_hook="bf16"), devices=2)
    """

    name: ClassVar[str] = "ddp"
    supports_restarts: bool = True

    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = True,
        bucket_cap_mb: float | None = None,
        comm_hook: Compression | CommHook | None = None,
        sync_batchnorm: bool = False,
        broadcast_buffers: bool = True,
        **settings: Unpack[ProcessSettings],
    ) -> None:
        options = DDPOptions(
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
            bucket_cap_mb=bucket_cap_mb,
            comm_hook=comm_hook,
            sync_batchnorm=sync_batchnorm,
            broadcast_buffers=broadcast_buffers,
        )
        super().__init__(options, **settings)
