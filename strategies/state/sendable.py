"""Tensors that ranks can send each other and keep alike, and those that a strategy has to send otherwise, or refuse."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...common.errors import ModuleError
from ...common.foreign import is_equal_to_itself
from ..wrapped.wrapped_blocks import can_be_cut
from ..wrapped.wrapped_tensors import is_wrapped
from .dtensor import is_dtensor

_SENT: Final = frozenset(
    (
        *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
)
"""The dtypes that gloo and NCCL send as they are; `Collectives` sends those of others as bytes."""


def is_sent(tensor: Tensor) -> bool:
    """Return whether torch's own collectives send a tensor of this dtype."""
    return tensor.dtype in _SENT


def check_sendable(module: nn.Module, strategy: str) -> None:
    """Check that rank 0's values of all parameters and buffers can be sent to the other ranks.

    Raises:
        ModuleError: naming the sparse and quantized ones.
    """
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        kind = "" if is_lazy(tensor) or is_dtensor(tensor) else _unsent_kind(tensor)
        if kind:
            raise ModuleError(
                f"{name} of {type(module).__name__} is a {kind} tensor, which strategy={strategy!r} cannot send from "
                "rank 0 to the others; keep the dense tensors that it is made of as buffers, and make it in the step, "
                "or use strategy='single'."
            )


def check_shapes(module: nn.Module) -> None:
    """Check that all parameters and buffers have a shape, which lazy layers give them in their first forward.

    Raises:
        ModuleError: naming those that have none.
    """
    named = chain(module.named_parameters(), module.named_buffers())
    lazy = [name for name, tensor in named if is_lazy(tensor)]
    if lazy:
        raise ModuleError(
            f"{', '.join(lazy[:5])} of {type(module).__name__} has no shape yet, so that several ranks or devices "
            "cannot start with the same values of it; call the module once before fit, or give its lazy layers their "
            "sizes."
        )


def check_lookups(module: nn.Module, strategy: str) -> None:
    """Check that no embedding rescales the rows that it looks up, which differ where ranks have other samples.

    Raises:
        ModuleError: naming one that does.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise ModuleError(
                f"{name or 'the module'} ({type(layer).__name__}) of {type(module).__name__} has "
                f"max_norm={layer.max_norm}, by which its forward writes the rows that it looks up; with "
                f"strategy={strategy!r} each rank or device would write those of its own samples. Leave max_norm out "
                "and limit the norm of what the layer returns, or use strategy='single'."
            )


def check_shardable(module: nn.Module, strategy: str, device_type: str) -> None:
    """Check that modules can be told apart, and that parameters have dtypes of which shards can be gathered.

    Raises:
        ModuleError: naming the others.
    """
    for name, part in module.named_modules():
        if not is_equal_to_itself(part):
            raise ModuleError(
                f"{name or 'the module'} ({type(part).__name__}) is not equal to itself, by its __eq__, and "
                f"strategy={strategy!r} keeps what it knows of modules in dicts; leave __eq__ out, or use "
                "strategy='ddp' or 'zero'."
            )
    for name, parameter in module.named_parameters() if device_type == "cpu" else ():
        if not (is_lazy(parameter) or is_sent(parameter)):
            raise ModuleError(
                f"{name} of {type(module).__name__} is a parameter of {parameter.dtype}, of which "
                f"strategy={strategy!r} can gather no shards on CPUs; make it a buffer (register_buffer), or use "
                "strategy='ddp' or 'zero'."
            )


def check_wrapped(module: nn.Module, strategy: str, degrees: Mapping[str, int]) -> None:
    """Check that parameters which keep their elements in others, as quantized ones do, can be divided over ranks.

    Args:
        module: the module, before it is placed.
        strategy: its name, for messages.
        degrees: of tp and pp, and ``shards``, the number of shards.

    Raises:
        ModuleError: naming one that cannot.
    """
    for name, parameter in module.named_parameters():
        if not is_wrapped(parameter):
            continue
        what = f"{name} of {type(module).__name__} is a {type(parameter).__name__} of {list(parameter.shape)}"
        for axis in ("tp", "pp"):
            if degrees[axis] > 1:
                raise ModuleError(
                    f"{what}, and {axis}={degrees[axis]} divides layers of plain tensors only; use strategy='fsdp', "
                    "which shards quantized ones, or strategy='ddp'."
                )
        if not can_be_cut(parameter, degrees["shards"]):
            raise ModuleError(
                f"{what}, whose quantization blocks cannot be dealt to {degrees['shards']} ranks (strategy="
                f"{strategy!r}) in equal numbers of rows; quantize it in smaller blocks, leave it unquantized, or use "
                "strategy='ddp'."
            )


def _unsent_kind(tensor: Tensor) -> str:
    if tensor.layout is not torch.strided:
        return "sparse"
    return "quantized" if tensor.is_quantized else ""
