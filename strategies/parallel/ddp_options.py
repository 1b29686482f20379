"""DDPOptions: how torch's DDP synchronizes gradients, and compresses them with its communication hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from ...common.errors import ConfigError
from ..devices.abilities import has_sync_batchnorm

Compression = Literal["fp16", "bf16", "powersgd"]
CommHook = tuple[object, Callable[..., object]]
"""The state and function of a DDP communication hook, either torch's or the user's."""

_COMPRESSIONS: Final[tuple[Compression, ...]] = ("fp16", "bf16", "powersgd")


@dataclass(frozen=True, kw_only=True)
class DDPOptions:
    """How torch's ``DistributedDataParallel`` synchronizes gradients; manual optimization does without it.

    Example::

        Trainer(strategy=ZeroStrategy(ddp=DDPOptions(bucket_cap_mb=50)), devices=2)
    """

    find_unused_parameters: bool = False
    """For a module in which some parameters get no gradient in some steps; walks the autograd graph of every step."""
    static_graph: bool = False
    """Promise that every step uses the same parameters; then unused ones cost nothing."""
    gradient_as_bucket_view: bool = True
    """Let gradients be views of the communication buckets, which saves a copy of them all."""
    bucket_cap_mb: float | None = None
    """The size of a bucket; by default torch's 25 MB."""
    comm_hook: Compression | CommHook | None = None
    """How gradients are compressed: ``"fp16"``, ``"bf16"`` or ``"powersgd"`` (rank 4, after 1000 steps), or the state
    and function of a DDP communication hook. Compression is lossy: it changes the numbers."""
    sync_batchnorm: bool = False
    """Compute batch norm statistics over all ranks (GPUs only, as in torch)."""
    broadcast_buffers: bool = True
    """Copy rank 0's buffers to all ranks before each step."""

    @property
    def compressed_fraction(self) -> float:
        """The fraction of float32 gradients that is sent; 1 is assumed for PowerSGD and for the user's own hook."""
        return 0.5 if self.comm_hook in ("fp16", "bf16") else 1.0

    def validate(self, device_type: str) -> None:
        """Check the options before any process is started.

        Raises:
            ConfigError: for options that torch does not know, does not support on these devices, or cannot combine.
        """
        check_compression(self.comm_hook)
        if self.sync_batchnorm and not has_sync_batchnorm(device_type):
            raise ConfigError(
                "sync_batchnorm=True needs GPUs (torch's SyncBatchNorm runs nowhere else), got "
                f"accelerator={device_type!r}; leave it out here, or use GroupNorm, which needs no statistics."
            )
        if self.static_graph and self.find_unused_parameters:
            raise ConfigError(
                f"static_graph={self.static_graph} and find_unused_parameters={self.find_unused_parameters} cannot be "
                "combined: a static graph knows its unused parameters after one step; leave one of them out."
            )


def check_compression(hook: Compression | CommHook | None) -> None:
    """Check that a hook exists.

    Raises:
        ConfigError: for an unknown name.
    """
    if hook is not None and not isinstance(hook, tuple) and hook not in _COMPRESSIONS:
        raise ConfigError(
            f"comm_hook={hook!r} is not known; choose one of {', '.join(_COMPRESSIONS)}, or give (state, hook) with a "
            "hook of torch.distributed.algorithms.ddp_comm_hooks."
        )


def register_compression(wrapper: Any, hook: Compression | CommHook) -> None:
    """Make DDP compress the gradients that it sends."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if isinstance(hook, tuple):
        wrapper.register_comm_hook(*hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4)
        wrapper.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        compress = default_hooks.fp16_compress_hook if hook == "fp16" else default_hooks.bf16_compress_hook
        # A lambda: torch rejects its bf16 hook by name on builds without NCCL (2.13), although it works there, and it
        # rejects annotations other than its own classes.
        wrapper.register_comm_hook(None, lambda state, bucket: compress(state, bucket))  # noqa: PLW0108
