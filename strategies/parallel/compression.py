"""Compression of the gradients that DDP sends, with torch's communication hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from ...common.errors import ConfigError

Compression = Literal["fp16", "bf16", "powersgd"]
CommHook = tuple[object, Callable[..., object]]
"""The state and function of a DDP communication hook, either torch's or the user's."""

_COMPRESSIONS: Final[tuple[Compression, ...]] = ("fp16", "bf16", "powersgd")


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
