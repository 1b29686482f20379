"""Transfer of batches from the loader to the device, and their number of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...callbacks.dispatch import overrides_method
from ...common.errors import ModuleError
from ...strategies import Strategy
from ...strategies.devices.streams import current_stream, has_streams, new_stream, on_stream
from ...strategies.distributed.nested import iterate_tensors, named_leaves
from ..module.batch_size import warn_of_unclear_size
from ..module.data_module import DataHooks, DataModule
from ..module.train_module import TrainModule
from .stream import CountSamples

Transfer = Callable[[object, int], object]
Move = Callable[[object], object]

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def make_count(module: TrainModule) -> CountSamples:
    """Return a function that counts the samples of a batch: the module's `batch_size_of`, overridden or by default.

    The default warns if the tensors of the first batch disagree.
    """
    if overrides_method(module, "batch_size_of", TrainModule):
        return module.batch_size_of
    is_first = True

    def count(batch: object) -> int:
        nonlocal is_first
        if is_first:
            warn_of_unclear_size(batch)
            is_first = False
        return module.batch_size_of(batch)

    return count


def make_transfer(module: TrainModule, datamodule: DataModule | None, strategy: Strategy) -> Transfer | None:
    """Return a function that moves a batch to the device, through overridden hooks; None if there is nothing to do.

    A hook of the data module takes precedence over the module's of the same name.
    """
    hooks: dict[str, Any] = {}
    for name in _TRANSFER_HOOKS:
        owner = next(
            (one for one in (datamodule, module) if one is not None and overrides_method(one, name, DataHooks)), None
        )
        hooks[name] = getattr(owner, name) if owner is not None else None
    before, move, after = (hooks[name] for name in _TRANSFER_HOOKS)
    precision = strategy.precision
    device, carry = strategy.device, _make_batch_mover(strategy)
    # converted where that is faster; a hook that moves batches itself gets converted ones
    converts_first = not has_streams(device) or move is not None
    if not any((before, move, after)) and strategy.device.type == "cpu" and precision.param_dtype is None:
        return None

    def transfer(batch: object, dataloader_idx: int) -> Any:
        if before is not None:
            batch = before(batch, dataloader_idx)
        batch = precision.convert_batch(batch) if converts_first else batch
        batch = carry(batch) if move is None else move(batch, strategy.device, dataloader_idx)
        batch = batch if converts_first else precision.convert_batch(batch)
        batch = after(batch, dataloader_idx) if after is not None else batch
        if batch is None:
            raise ModuleError(
                f"{' and '.join(name for name, hook in hooks.items() if hook is not None)} must return the batch, got "
                "None; return it."
            )
        return batch

    return transfer


def make_move(strategy: Strategy) -> Move | None:
    """Return a function that moves a batch to the device in the precision's dtype; None if there is nothing to do."""
    precision, carry = strategy.precision, _make_batch_mover(strategy)
    if strategy.device.type == "cpu":
        return None if precision.param_dtype is None else precision.convert_batch
    return lambda batch: precision.convert_batch(carry(batch))


def _make_batch_mover(strategy: Strategy) -> Move:
    """Return a function that copies a batch to the device; on a GPU, while it is computing."""
    device, move = strategy.device, strategy.batch_to_device
    return SideStream(move, device) if has_streams(device) else move


class SideStream:
    """Moves batches to a device on a stream of its own.

    The host runs ahead of the device: while the device computes one batch, the next one is copied, and its computation
    waits only for that copy. If the batch is in pinned memory, the host does not wait for the copy either.
    """

    def __init__(self, move: Callable[[object], object], device: torch.device) -> None:
        self._move, self._device = move, device
        self._stream = new_stream(device)

    def __call__(self, batch: object) -> object:
        """Return the batch on the device; the current stream uses it once the copy is complete."""
        if any(callable(getattr(leaf, "to", None)) for _, leaf in named_leaves(batch) if not isinstance(leaf, Tensor)):
            return self._move(batch)  # the memory of such an object is unknown, and cannot be protected from reuse
        with on_stream(self._device, self._stream):
            moved = self._move(batch)
        computing = current_stream(self._device)
        computing.wait_stream(self._stream)
        for tensor in iterate_tensors(moved):
            if tensor.device.type == self._device.type:
                # otherwise its memory could be given to the next batch while this one is still in use
                tensor.record_stream(computing)
        return moved
