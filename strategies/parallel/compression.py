"""Gradients of DDP made smaller on their way, by torch's communication hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from ..errors import ConfigError

Compression = Literal["fp16", "bf16", "powersgd"]
CommHook = tuple[object, Callable[[Any, Any], Any]]
"""State and function of a hook of torch, or of the user."""

_COMPRESSIONS: Final[tuple[Compression, ...]] = ("fp16", "bf16", "powersgd")


def check_compression(hook: Compression | CommHook | None) -> None:
    """Check that there is such a hook.

    Raises:
        ConfigError: for a name that none has.
    """
    if hook is not None and not isinstance(hook, tuple) and hook not in _COMPRESSIONS:
        raise ConfigError(
            f"comm_hook={hook!r} is not known; choose one of {', '.join(_COMPRESSIONS)}, or give a state and a hook "
            "of torch.distributed.algorithms.ddp_comm_hooks."
        )


def register_compression(wrapper: Any, hook: Compression | CommHook) -> None:
    """Let DDP compress gradients on their way."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if isinstance(hook, tuple):
        wrapper.register_comm_hook(*hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4)
        wrapper.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        compress = default_hooks.fp16_compress_hook if hook == "fp16" else default_hooks.bf16_compress_hook
        # Under a name of its own, and without annotations: torch refuses its bf16 hook, by name, on builds without NCCL
        # (2.13), where it works; and any annotation that is no class of its own.
        wrapper.register_comm_hook(None, lambda state, bucket: compress(state, bucket))  # noqa: PLW0108
