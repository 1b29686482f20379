"""DDPStrategy: a replica of the module in every process; gradients meet in buckets while backward still runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Unpack

from torch import Tensor, nn

from .errors import ConfigError, ModuleError
from .gradients import average_gradients
from .hardware import Hardware
from .precision import Precision
from .process_group import ProcessSettings
from .replica import (
    COMPRESSIONS,
    CommHook,
    Compression,
    StepCaller,
    copy_from_first,
    copy_module_from_first,
    register_compression,
    zero_loss_of,
)
from .strategy import Strategy


class DDPStrategy(Strategy):
    """Train with torch's ``DistributedDataParallel``: each process reads its share of every global batch.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020. In manual
    optimization gradients meet at the end of each ``manual_backward`` instead, and none of the arguments is needed.

    Args:
        find_unused_parameters: for a module some of whose parameters get no gradient in some steps; walks the graph of
            every step.
        static_graph: promises that every step uses the same parameters; then unused ones cost nothing.
        gradient_as_bucket_view: let gradients lie in the buckets that are sent, which saves a copy of them all.
        bucket_cap_mb: how much is sent at once; by default torch's 25 MB.
        comm_hook: how gradients are compressed on their way: ``"fp16"``, ``"bf16"`` or ``"powersgd"`` (rank 4, after
            1000 steps), or state and function of a hook of torch's kind. Changes the numbers by what it leaves out.
        sync_batchnorm: compute the statistics of batch norms over all ranks (GPUs only, as torch has it).
        broadcast_buffers: give all ranks rank 0's buffers before each step.
        settings: those of the processes, see `ProcessSettings`.
    """

    name: ClassVar[str] = "ddp"
    uses_processes: ClassVar[bool] = True
    uses_many_devices: ClassVar[bool] = True

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
        super().__init__(**settings)
        self.find_unused_parameters = find_unused_parameters
        self.static_graph = static_graph
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.bucket_cap_mb = bucket_cap_mb
        self.comm_hook = comm_hook
        self.sync_batchnorm = sync_batchnorm
        self.broadcast_buffers = broadcast_buffers
        self._wrapper: Any = None
        self._averages_after_backward = False
        self._is_first_backward = True

    def check(self, hardware: Hardware, precision: Precision) -> None:
        super().check(hardware, precision)
        hook = self.comm_hook
        if hook is not None and not isinstance(hook, tuple) and hook not in COMPRESSIONS:
            raise ConfigError(
                f"comm_hook={hook!r} is not known; choose one of {', '.join(COMPRESSIONS)}, or give a state and a hook "
                "of torch.distributed.algorithms.ddp_comm_hooks."
            )
        if self.sync_batchnorm and hardware.device_type != "cuda":
            raise ConfigError(
                "sync_batchnorm=True needs GPUs (torch's SyncBatchNorm runs nowhere else), found "
                f"accelerator={hardware.device_type!r}; leave it out here, or use GroupNorm, which needs no statistics."
            )
        if self.static_graph and self.find_unused_parameters:
            raise ConfigError(
                f"static_graph={self.static_graph} and find_unused_parameters={self.find_unused_parameters} exclude "
                "each other: a static graph knows its unused parameters after one step; leave one of them out."
            )

    def setup_module(self, module: nn.Module, *, is_manual: bool = False) -> None:
        super().setup_module(module, is_manual=is_manual)
        self._wrapper, self._averages_after_backward = None, False
        if self.group is None:
            return
        if self.sync_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(module)
        if is_manual or not any(parameter.requires_grad for parameter in module.parameters()):
            if self.comm_hook is not None and is_manual:
                raise ConfigError(
                    f"comm_hook={self.comm_hook!r:.40} works inside DDP's backward, which manual optimization does not "
                    "use; leave it out."
                )
            self._averages_after_backward = is_manual
            copy_module_from_first(module, self.collectives)
        else:
            self._wrap(module)

    def _wrap(self, module: nn.Module) -> None:
        from torch.nn.parallel import DistributedDataParallel

        wrap: Any = DistributedDataParallel
        self._caller = StepCaller(module, returns_tensors=self.find_unused_parameters or self.static_graph)
        # torch 2.14 deprecates broadcast_buffers for forward_sync_buffers, which 2.11 does not have
        is_new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        self._wrapper = wrap(
            self._caller,
            **{"forward_sync_buffers" if is_new else "broadcast_buffers": self.broadcast_buffers},
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )
        self._is_first_backward = True
        if self.comm_hook is not None:
            register_compression(self._wrapper, self.comm_hook)

    def run(self, step_name: str, *args: Any) -> Any:
        with self.forward_context:
            if self._wrapper is None or step_name != "training_step":
                return getattr(self.module, step_name)(*args)
            return self._caller.rebuild(self._wrapper(step_name, *args))

    def accumulate(self, *, is_last: bool) -> None:
        if self._wrapper is not None:
            # a static graph learns its graph in the first backward, which therefore has to be a synchronised one;
            # averaging what has been averaged changes nothing
            learns = self.static_graph and self._is_first_backward
            self._wrapper.require_backward_grad_sync = is_last or learns

    def zero_loss(self, spare: Callable[[], Tensor]) -> Tensor:
        if self._wrapper is None:
            return super().zero_loss(spare)
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        # those of the step before: a gradient of 0 for one that nobody uses would still decay its weights
        used = [parameter for parameter in trained if parameter.grad is not None]
        return zero_loss_of(self._wrapper, self._caller, used or trained)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if self._averages_after_backward:
            average_gradients(self.module.parameters(), self.collectives)
        elif self._is_first_backward and self._wrapper is not None and self._wrapper.require_backward_grad_sync:
            self._is_first_backward = False
            self._check_all_used()

    def _check_all_used(self) -> None:
        if self.find_unused_parameters or self.static_graph:
            return
        unused = [name for name, p in self.module.named_parameters() if p.requires_grad and p.grad is None]
        if unused:
            raise ModuleError(
                f"{len(unused)} parameter(s) got no gradient in training_step, and DDP waits for one of each: "
                f"{', '.join(unused[:8])}{', ...' if len(unused) > 8 else ''}. Use them in the loss, freeze them "
                "(requires_grad_(False)), or set DDPStrategy(find_unused_parameters=True)."
            )

    def settle(self) -> None:
        if self.group is not None and self.broadcast_buffers:
            copy_from_first(self.module.buffers(), self.collectives)
