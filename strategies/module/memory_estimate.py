"""Memory estimate: the bytes of parameters, gradients and optimizer state that a rank holds, and should hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..distributed.nested import iterate_tensors
from ..state.dtensor import bytes_of, local_shard
from ..torch_internals.tensors import find_base, read_components
from ..wrapped.wrapped_tensors import held_tensors, is_wrapped

Share = Callable[[Tensor], float]


def whole_share(parameter: Tensor) -> float:
    """Return 1.0: a rank keeps all of the parameter."""
    return 1.0


@dataclass(frozen=True)
class MemoryShare:
    """The fraction of each parameter's memory that a strategy keeps on each rank, as functions of the parameter."""

    parameters: Share = whole_share
    gradients: Share = whole_share
    optimizer: Share = whole_share


@dataclass(frozen=True)
class Memory:
    """The bytes on one rank."""

    parameters: float
    gradients: float
    optimizer: float


def held_memory(module: nn.Module, optimizers: Iterable[Optimizer]) -> Memory:
    """Return the memory that this rank holds now; parameters of other stages of a pipeline are without memory here."""
    parameters = [parameter for parameter in module.parameters() if not (is_lazy(parameter) or parameter.is_meta)]
    return Memory(
        parameters=_held_bytes(parameters),
        gradients=_held_bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
        optimizer=sum(_held_bytes(iterate_tensors(list(optimizer.state.values()))) for optimizer in optimizers),
    )


def expected_memory(module: nn.Module, optimizers: Sequence[Optimizer], share: MemoryShare) -> Memory:
    """Return the memory that a rank should hold once gradients and optimizer state exist."""
    parameters = [parameter for parameter in module.parameters() if not is_lazy(parameter)]
    return Memory(
        parameters=shared_bytes(parameters, share.parameters),
        gradients=shared_bytes((parameter for parameter in parameters if parameter.requires_grad), share.gradients),
        optimizer=sum(_expected_state(optimizer, share.optimizer) for optimizer in optimizers),
    )


def shared_bytes(parameters: Iterable[Tensor], share: Share) -> float:
    """Return the bytes of parameters on a rank that keeps a share of each."""
    return sum(bytes_of(parameter) * share(parameter) for parameter in parameters)


def _expected_state(optimizer: Optimizer, share: Share) -> float:
    states: dict[Any, Any] = dict(optimizer.state)
    held = _held_bytes(iterate_tensors(list(states.values())))
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    expected = shared_bytes(trained, share)
    if expected == shared_bytes(trained, whole_share):
        return held
    # this rank has only some of the state; assume the same ratio of state to parameter bytes for the rest
    return held / (_held_bytes(states) or 1) * expected


def _held_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(size_of(local_shard(tensor)) for tensor in tensors)


def size_of(tensor: Tensor) -> int:
    """Return the bytes of the numbers of a tensor; of a sparse one, with its indices."""
    if tensor.is_sparse:
        return sum(part.nbytes for part in read_components(tensor))
    if is_wrapped(tensor):
        return sum(size_of(held) for held in held_tensors(tensor))
    if tensor.is_meta or tensor.layout is not torch.strided:
        return tensor.nbytes
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())  # an expanded tensor stores fewer elements


class KeptForBackward(torch.autograd.graph.saved_tensors_hooks):
    """Counts the memory of the tensors that forward saves for backward, except parameters, in the current thread.

    Tensors that activation checkpointing drops do not count. With torch versions older than 2.14, those that selective
    checkpointing keeps may not count either.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        super().__init__(self._note, _return_unchanged)

    @property
    def num_bytes(self) -> int:
        """The total size of the saved storages, each counted once."""
        return sum(self._sizes.values())

    def _note(self, tensor: Tensor) -> Tensor:
        if not isinstance(find_base(tensor), nn.Parameter):
            storage = local_shard(tensor.detach()).untyped_storage()
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor


def _return_unchanged(tensor: Tensor) -> Tensor:
    return tensor
