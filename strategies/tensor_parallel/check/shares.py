"""Outputs of which each rank has a share, such as attention weights by head: what computes with one is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from ....common.errors import ModuleError
from ...distributed.nested import map_tensors
from ...torch_internals.tensors import DisableTorchFunctionSubclass

_HARMLESS: Final = frozenset(
    [
        *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.register_hook),
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "is_leaf")),
        *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad_fn", "is_meta", "is_sparse", "_base")),
    ]
)
"""What may be asked of a share: it is the same for all ranks' shares, and computes nothing."""
_KEEPING: Final = frozenset([Tensor.view_as, Tensor.detach, Tensor.requires_grad_])
"""What FSDP and checkpoints do to the inputs of a block: the result is the same share."""


class OutputShare(Tensor):
    """This rank's share of an output of a block; every rank has another one.

    Another block of the plan may take it, as T5's layers take the biases of their heads from the first.

    Raises:
        ModuleError: by whatever else computes with it, as one process would compute with all of it.
    """

    block: str
    cut_dim: int
    """The dimension of which this rank has a part."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        with DisableTorchFunctionSubclass():
            if func in _HARMLESS:
                return func(*args, **(kwargs or {}))
            share = next((one for one in _list_leaves((args, kwargs)) if isinstance(one, OutputShare)), None)
            if share is not None and func in _KEEPING and args[0].shape == share.shape:
                return mark_as_share(func(*map(unwrap_share, args), **(kwargs or {})), share.block, share.cut_dim)
            name = "a block" if share is None else f"the block {share.block!r}"
            shape = () if share is None else tuple(share.shape)
            raise ModuleError(
                f"{name} returned a tensor of shape {shape} with this rank's share of its features or heads, and "
                f"{_name_of_function(func)} computes with it, which needs all of them: leave the block's "
                "layers out of tp_plan, or compute without this output."
            )


def mark_as_share(tensor: Tensor, block: str, cut_dim: int) -> OutputShare:
    """Return a tensor as a share of a block's output."""
    share = tensor.as_subclass(OutputShare)
    share.block, share.cut_dim = block, cut_dim
    return share


def unwrap_share(tensor: object) -> Any:
    """Return a share as a tensor, with which everything computes; another object as is."""
    if not isinstance(tensor, OutputShare):
        return tensor
    with DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def _name_of_function(func: Any) -> str:
    """Return the name of a function, or of the attribute that it reads."""
    name = getattr(func, "__name__", str(func))
    return str(getattr(func.__self__, "__name__", name)) if name == "__get__" else name


def _list_leaves(data: object) -> list[object]:
    if isinstance(data, Mapping):
        return [leaf for value in data.values() for leaf in _list_leaves(value)]
    if isinstance(data, list | tuple):
        return [leaf for value in data for leaf in _list_leaves(value)]
    return [data]


def shared_dim(whole: torch.Size, own: torch.Size, number: int) -> int | None:
    """Return the only dimension in which a shape is one of `number` equal shares of another; None if there is none."""
    if len(whole) != len(own) or whole == own:
        return None
    cut = [dim for dim, (all_, mine) in enumerate(zip(whole, own, strict=True)) if all_ != mine]
    return cut[0] if len(cut) == 1 and own[cut[0]] * number == whole[cut[0]] else None


def admit_shares(block: nn.Module) -> None:
    """Let a block of the plan compute with the shares that it is given: its heads are those of the shares."""

    def admit(block: nn.Module, args: object, kwargs: object) -> Any:
        return None if torch.compiler.is_compiling() else map_tensors(unwrap_share, (args, kwargs))

    block.register_forward_pre_hook(admit, with_kwargs=True)


def guard_shares(name: str, block: nn.Module, places: Mapping[int, int]) -> None:
    """Make some of a block's floating-point outputs a `OutputShare` whenever it is called.

    Args:
        name: the block's.
        block: the block.
        places: the numbers of these outputs, and the dimension that is cut.
    """

    def mark(block: nn.Module, args: object, outputs: object) -> Any:
        if torch.compiler.is_compiling():
            return outputs
        number = -1

        def of(tensor: Tensor) -> Tensor:
            nonlocal number
            number += tensor.is_floating_point()
            if number not in places or not tensor.is_floating_point():
                return tensor
            return mark_as_share(tensor, name, places[number])

        return map_tensors(of, outputs)

    block.register_forward_hook(mark)
