"""What strategies with a whole replica of the module on each rank share: the wrapped step, and equal replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from .collectives import Collectives
from .nested import iterate_tensors, map_tensors

Compression = Literal["fp16", "bf16", "powersgd"]
CommHook = tuple[object, Callable[[Any, Any], Any]]
"""State and function of a hook of torch, or of the user."""

COMPRESSIONS: Final[tuple[Compression, ...]] = ("fp16", "bf16", "powersgd")

_WITHOUT_SAMPLES: Final = "without samples"


class StepCaller(nn.Module):
    """A module whose ``forward`` is any step of another: what a wrapper that needs ``forward`` to be called wraps."""

    def __init__(self, module: nn.Module, *, returns_tensors: bool) -> None:
        super().__init__()
        self.module = module
        self._returns_tensors = returns_tensors
        self._structure: Any = None

    def forward(self, step_name: str, *args: Any) -> Any:
        """Call the step, or add up the parameters given in its place.

        With `returns_tensors`, DDP gets the tensors of what the step returned as a list: it looks for them to find the
        parameters that were used, and knows no classes such as `Loss`. `rebuild` puts them back.
        """
        if step_name == _WITHOUT_SAMPLES:
            output: Any = torch.stack([parameter.reshape(-1)[0].double() * 0 for parameter in args[0]]).sum()
        else:
            output = getattr(self.module, step_name)(*args)
        if not self._returns_tensors:
            return output
        self._structure = output
        return list(iterate_tensors(output))

    def rebuild(self, output: Any) -> Any:
        """Return what the step returned, with these tensors in place of its own."""
        if not self._returns_tensors:
            return output
        structure, self._structure, tensors = self._structure, None, iter(output)
        return map_tensors(lambda _: next(tensors), structure)


def zero_loss_of(wrapper: Any, caller: StepCaller, parameters: list[nn.Parameter]) -> Tensor:
    """Return a loss of 0 through the wrapper of a `StepCaller`, with a gradient of 0 for each of these parameters."""
    return caller.rebuild(wrapper(_WITHOUT_SAMPLES, parameters))  # type: ignore[no-any-return]


def copy_from_first(tensors: Iterable[Tensor], collectives: Collectives) -> None:
    """Give tensors the values that they have on rank 0. Collective: every rank calls it."""
    mine = list(tensors)
    with torch.no_grad():
        for tensor, first in zip(mine, collectives.broadcast([tensor.detach() for tensor in mine]), strict=True):
            tensor.copy_(first)


def copy_module_from_first(module: nn.Module, collectives: Collectives) -> None:
    """Give a module the parameters and buffers of rank 0. Collective: every rank calls it."""
    copy_from_first(chain(module.parameters(), module.buffers()), collectives)


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

        # under a name of its own: torch refuses its bf16 hook, by name, on builds without NCCL (2.13), where it works
        def compressed(state: Any, bucket: Any) -> Any:
            return compress(state, bucket)

        wrapper.register_comm_hook(None, compressed)
