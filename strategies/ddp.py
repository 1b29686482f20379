"""DDPStrategy: every process trains a replica of the module; gradients are averaged in buckets during backward."""

from __future__ import annotations

from typing import ClassVar, Unpack

from .distributed.process_group import ProcessSettings
from .parallel.compression import CommHook, Compression
from .parallel.replica import DDPOptions
from .replicated import ReplicaStrategy


class DDPStrategy(ReplicaStrategy):
    """Train with torch's ``DistributedDataParallel``: each process reads its slice of every global batch.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020. In manual
    optimization gradients are averaged at the end of each ``manual_backward`` instead, without the arguments below.

    Args:
        find_unused_parameters: for a module in which some parameters get no gradient in some steps; walks the autograd
            graph of every step.
        static_graph: promise that every step uses the same parameters; then unused ones cost nothing.
        gradient_as_bucket_view: let gradients be views of the buckets that are sent, which saves a copy of them all.
        bucket_cap_mb: the size of a bucket; by default torch's 25 MB.
        comm_hook: how gradients are compressed: ``"fp16"``, ``"bf16"`` or ``"powersgd"`` (rank 4, after 1000 steps), or
            the state and function of a DDP communication hook. Changes the numbers by what it leaves out.
        sync_batchnorm: compute the statistics of batch norms over all ranks (GPUs only, as in torch).
        broadcast_buffers: give all ranks rank 0's buffers before each step.
        settings: see `ProcessSettings`.
    """

    name: ClassVar[str] = "ddp"
    supports_restarts: ClassVar[bool] = True

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
