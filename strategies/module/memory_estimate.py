"""Memory: what a rank holds of a module's parameters, gradients and optimizer state, and should hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..distributed.nested import iterate_tensors
from ..state.dtensor import local_shard


@dataclass(frozen=True)
class MemoryShare:
    """Which fraction of the whole each rank holds, as a strategy has it."""

    parameters: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank."""

    parameters: float
    gradients: float
    optimizer: float


def held_memory(module: nn.Module, optimizers: Iterable[Optimizer]) -> Memory:
    """Return what this rank holds now."""
    parameters = [parameter for parameter in module.parameters() if not is_lazy(parameter)]
    return Memory(
        parameters=_held(parameters),
        gradients=_held(parameter.grad for parameter in parameters if parameter.grad is not None),
        optimizer=sum(_held(iterate_tensors(list(optimizer.state.values()))) for optimizer in optimizers),
    )


def expected_memory(module: nn.Module, optimizers: Sequence[Optimizer], share: MemoryShare) -> Memory:
    """Return what a rank should hold when gradients and optimizer state are there."""
    parameters = [parameter for parameter in module.parameters() if not is_lazy(parameter)]
    return Memory(
        parameters=_whole(parameters) * share.parameters,
        gradients=_whole(parameter for parameter in parameters if parameter.requires_grad) * share.gradients,
        optimizer=sum(_expected_state(optimizer, share.optimizer) for optimizer in optimizers),
    )


def _expected_state(optimizer: Optimizer, share: float) -> float:
    states: dict[Any, Any] = dict(optimizer.state)
    held = _held(iterate_tensors(list(states.values())))
    if share == 1.0:
        return held
    # this rank has the state of some parameters only, or of parts; the others have as much for each of their bytes
    per_byte = held / (_held(states) or 1)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return per_byte * _whole(trained) * share


def _held(tensors: Iterable[Tensor]) -> int:
    return sum(local_shard(tensor).nbytes for tensor in tensors)


def _whole(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class KeptForBackward(torch.autograd.graph.saved_tensors_hooks):
    """Counts the memory of what forward keeps for backward, parameters apart, in the thread that enters it.

    What activation checkpointing drops does not count; what it keeps selectively may not either with a torch older than
    2.14.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        super().__init__(self._note, _same)

    @property
    def num_bytes(self) -> int:
        """Of all storages kept, each once."""
        return sum(self._sizes.values())

    def _note(self, tensor: Tensor) -> Tensor:
        whole = tensor if tensor._base is None else tensor._base  # noqa: SLF001
        if not isinstance(whole, nn.Parameter):
            storage = local_shard(tensor.detach()).untyped_storage()
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor


def _same(tensor: Tensor) -> Tensor:
    return tensor
