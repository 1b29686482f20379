"""DDPStrategy: every process trains a replica of the module; gradients are averaged in buckets during backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Unpack

from torch import Tensor, nn

from .cluster.hardware import Hardware
from .distributed.process_group import ProcessSettings
from .module.precision import Precision
from .parallel.compression import CommHook, Compression
from .parallel.replica import DDPOptions, Replica
from .parallel.replica_check import ReplicaCheck, ReplicaDifference
from .state.sendable import check_sendable
from .strategy import Strategy


class ReplicaStrategy(Strategy):
    """Train a `Replica` of the module in each process; subclasses differ in the optimizer step.

    Args:
        options: how gradients are synchronized.
        settings: see `ProcessSettings`.
    """

    uses_processes: ClassVar[bool] = True
    uses_many_devices: ClassVar[bool] = True

    # Known after `setup_module`:
    _replica: Replica
    _check: ReplicaCheck | None

    def __init__(self, options: DDPOptions | None = None, **settings: Unpack[ProcessSettings]) -> None:
        super().__init__(**settings)
        self.options = options or DDPOptions()
        self.can_try_steps = self.can_try_steps and self.options.comm_hook in (None, "fp16", "bf16")  # without a state

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        super().validate(hardware, precision)
        self.options.validate(hardware.device_type)

    def validate_module(self, module: nn.Module, *, trains: bool = True) -> None:
        if self.environment.world_size > 1:
            check_sendable(module, self.name)

    def setup_module(self, module: nn.Module, *, is_manual: bool = False) -> None:
        if self.ranks.group is not None:
            check_sendable(module, self.name)  # with what configure_model has built
        super().setup_module(module, is_manual=is_manual)
        self._replica = self._make_replica(module, is_manual=is_manual)
        self._check = None if self.ranks.group is None else self._make_check(module)

    def _make_replica(self, module: nn.Module, *, is_manual: bool) -> Replica:
        collectives = None if self.ranks.group is None else self.ranks.all
        return Replica(module, collectives, self.options, is_manual=is_manual)

    def _make_check(self, module: nn.Module) -> ReplicaCheck | None:
        return ReplicaCheck(module, self.ranks.all)

    def run(self, step_name: str, *args: Any) -> Any:
        with self.forward_context:
            return self._replica.step_fn(step_name)(*args)

    def step_fn(self, step_name: str) -> Callable[..., Any]:
        return self._replica.step_fn(step_name) if self.precision.is_plain else super().step_fn(step_name)

    def set_grad_sync(self, enabled: bool) -> None:
        self._replica.set_grad_sync(enabled)

    def stand_by(self, step_name: str, busy: Sequence[bool], run: Callable[[Any], None]) -> None:
        loss = self._replica.zero_loss()
        with nullcontext() if self._check is None else self._check.absent():
            if loss is None:
                super().stand_by(step_name, busy, run)
            else:
                self.backward(loss)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self.end_backward()

    def end_backward(self) -> None:
        self._replica.end_backward()
        if self._check is not None:
            self._check.count_backward()

    def sync_replicas(self, *, only_compares: bool = False, with_buffers: bool = False) -> ReplicaDifference | None:
        if not only_compares:
            self._replica.sync_replicas()
        return None if self._check is None else self._check.compare(with_buffers=with_buffers)


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
