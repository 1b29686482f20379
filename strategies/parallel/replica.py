"""Replica: a module that each rank has whole, and how the gradients of all replicas meet."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.collectives import Collectives
from ..errors import ConfigError, ModuleError
from .compression import CommHook, Compression, check_compression, register_compression
from .step_caller import StepCaller, zero_loss_of


@dataclass(frozen=True, kw_only=True)
class DDPOptions:
    """How torch's ``DistributedDataParallel`` synchronises gradients; in manual optimization none of it is needed."""

    find_unused_parameters: bool = False
    """For a module some of whose parameters get no gradient in some steps; walks the graph of every step."""
    static_graph: bool = False
    """Promises that every step uses the same parameters; then unused ones cost nothing."""
    gradient_as_bucket_view: bool = True
    """Let gradients lie in the buckets that are sent, which saves a copy of them all."""
    bucket_cap_mb: float | None = None
    """How much is sent at once; by default torch's 25 MB."""
    comm_hook: Compression | CommHook | None = None
    """How gradients are compressed on their way: ``"fp16"``, ``"bf16"`` or ``"powersgd"`` (rank 4, after 1000 steps),
    or state and function of a hook of torch's kind. Changes the numbers by what it leaves out."""
    sync_batchnorm: bool = False
    """Compute the statistics of batch norms over all ranks (GPUs only, as torch has it)."""
    broadcast_buffers: bool = True
    """Give all ranks rank 0's buffers before each step."""

    def validate(self, device_type: str) -> None:
        """Check what can be known before any process is started.

        Raises:
            ConfigError: for what torch does not know, does not have on such devices, or cannot do together.
        """
        check_compression(self.comm_hook)
        if self.sync_batchnorm and device_type != "cuda":
            raise ConfigError(
                "sync_batchnorm=True needs GPUs (torch's SyncBatchNorm runs nowhere else), found "
                f"accelerator={device_type!r}; leave it out here, or use GroupNorm, which needs no statistics."
            )
        if self.static_graph and self.find_unused_parameters:
            raise ConfigError(
                f"static_graph={self.static_graph} and find_unused_parameters={self.find_unused_parameters} exclude "
                "each other: a static graph knows its unused parameters after one step; leave one of them out."
            )


class Replica:
    """This rank's replica of a module: what strategies hold whose parameters are whole on each rank.

    Its training step runs in ``DistributedDataParallel``. In manual optimization gradients meet at the end of each
    backward instead. On one process nothing is wrapped. Collective: every rank makes one.
    """

    def __init__(
        self, module: nn.Module, collectives: Collectives | None, options: DDPOptions, *, is_manual: bool
    ) -> None:
        """Make all replicas equal to rank 0's; `collectives` is None on one process.

        Raises:
            ConfigError: for options that manual optimization does not have.
        """
        self.synchronises = True
        """Whether the gradients of a step meet."""
        self._module, self._collectives, self._options = module, collectives, options
        self._wrapper: Any = None
        self._averages_after_backward = False
        self._is_first_backward = True
        if collectives is None:
            return
        if options.sync_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(module)
        if is_manual or not any(parameter.requires_grad for parameter in module.parameters()):
            if options.comm_hook is not None and is_manual:
                raise ConfigError(
                    f"comm_hook={options.comm_hook!r:.40} works inside DDP's backward, which manual optimization does "
                    "not use; leave it out."
                )
            self._averages_after_backward = is_manual
            copy_from_first(chain(module.parameters(), module.buffers()), collectives)
        else:
            self._wrap()

    def _wrap(self) -> None:
        from torch.nn.parallel import DistributedDataParallel

        wrap: Any = DistributedDataParallel
        options = self._options
        self._caller = StepCaller(self._module, returns_tensors=options.find_unused_parameters or options.static_graph)
        # torch 2.14 deprecates broadcast_buffers for forward_sync_buffers, which 2.11 does not have
        is_new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        self._wrapper = wrap(
            self._caller,
            **{"forward_sync_buffers" if is_new else "broadcast_buffers": options.broadcast_buffers},
            bucket_cap_mb=options.bucket_cap_mb,
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=options.gradient_as_bucket_view,
            static_graph=options.static_graph,
        )
        if options.comm_hook is not None:
            register_compression(self._wrapper, options.comm_hook)

    def step_fn(self, step_name: str) -> Callable[..., Any]:
        """Return what calls the module's step, as directly as can be."""
        if self._wrapper is None or step_name != "training_step":
            return getattr(self._module, step_name)  # type: ignore[no-any-return]
        if not self._caller.returns_tensors:
            return partial(self._wrapper, step_name)
        return lambda *args: self._caller.rebuild(self._wrapper(step_name, *args))

    def set_grad_sync(self, enabled: bool) -> None:
        """Note that a micro-batch begins; only the last of a step synchronises."""
        if self._wrapper is not None:
            # a static graph learns its graph in the first backward, which therefore has to be a synchronised one;
            # averaging what has been averaged changes nothing
            learns = self._options.static_graph and self._is_first_backward
            is_due = (enabled and self.synchronises) or learns
            if self._wrapper.require_backward_grad_sync != is_due:  # setting an attribute of a module takes a while
                self._wrapper.require_backward_grad_sync = is_due

    def zero_loss(self, spare: Callable[[], Tensor]) -> Tensor:
        """Return a loss of 0 whose backward takes part in a step of the other ranks."""
        if self._wrapper is None:
            return spare() * 0
        trained = [parameter for parameter in self._module.parameters() if parameter.requires_grad]
        # those of the step before: a gradient of 0 for one that nobody uses would still decay its weights
        used = [parameter for parameter in trained if parameter.grad is not None]
        return zero_loss_of(self._wrapper, self._caller, used or trained)

    def end_backward(self) -> None:
        """Let gradients meet that have not met during the backward, and check the first of those that have.

        Raises:
            ModuleError: naming parameters without a gradient, for each of which DDP would wait.
        """
        if self._averages_after_backward:
            if self.synchronises:
                assert self._collectives is not None
                average_gradients(self._module.parameters(), self._collectives)
        elif self._is_first_backward and self._wrapper is not None and self._wrapper.require_backward_grad_sync:
            self._is_first_backward = False
            self._check_all_used()

    def _check_all_used(self) -> None:
        if self._options.find_unused_parameters or self._options.static_graph:
            return
        unused = [name for name, p in self._module.named_parameters() if p.requires_grad and p.grad is None]
        if unused:
            raise ModuleError(
                f"{len(unused)} parameter(s) got no gradient in training_step, and DDP waits for one of each: "
                f"{', '.join(unused[:8])}{', ...' if len(unused) > 8 else ''}. Use them in the loss, freeze them "
                "(requires_grad_(False)), or set find_unused_parameters=True of the strategy."
            )

    def sync_replicas(self) -> None:
        """Give all replicas rank 0's buffers. Collective: every rank calls it."""
        if self._collectives is not None and self._options.broadcast_buffers:
            copy_from_first(self._module.buffers(), self._collectives)


def copy_from_first(tensors: Iterable[Tensor], collectives: Collectives) -> None:
    """Give tensors the values that they have on rank 0. Collective: every rank calls it."""
    mine = list(tensors)
    with torch.no_grad():
        for tensor, first in zip(mine, collectives.broadcast([tensor.detach() for tensor in mine]), strict=True):
            tensor.copy_(first)


def average_gradients(parameters: Iterable[nn.Parameter], collectives: Collectives) -> None:
    """Replace each gradient by its mean over ranks, one collective a dtype. Collective: every rank calls it.

    A parameter without a gradient on some ranks counts as 0 there; without one on any, it keeps none. Several backwards
    in a row add up as they should: what has been averaged already is equal on all ranks and stays so.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for group in by_dtype.values():
        _average(group, collectives)


def _average(parameters: list[nn.Parameter], collectives: Collectives) -> None:
    """Average gradients of one dtype; behind them travels which parameters have one."""
    like = parameters[0]
    has_gradient = torch.tensor([float(p.grad is not None) for p in parameters], dtype=like.dtype, device=like.device)
    gradients = [torch.zeros_like(p).reshape(-1) if p.grad is None else p.grad.reshape(-1) for p in parameters]
    flat = collectives.all_reduce(torch.cat([*gradients, has_gradient]), "mean")
    averaged = flat[: -len(parameters)].split([p.numel() for p in parameters])
    for parameter, gradient, fraction in zip(parameters, averaged, flat[-len(parameters) :].tolist(), strict=True):
        if not fraction:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad.copy_(gradient.view_as(parameter))
