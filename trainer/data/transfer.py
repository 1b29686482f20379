"""Transfer of batches from the loader to the device, and their number of samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...callbacks.dispatch import overrides
from ...strategies import Strategy
from ...strategies.distributed.nested import iterate_tensors
from ...strategies.errors import DataError, ModuleError
from ..module.data_module import DataHooks, DataModule
from ..module.train_module import TrainModule

Transfer = Callable[[Any, int], Any]

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def check_batch(batch: Any, what: str, moves_own_types: bool) -> None:
    """Check that a batch holds tensors.

    Raises:
        DataError: if it holds none, unless the user moves batches of types of their own.
    """
    if moves_own_types or next(iterate_tensors(batch), None) is not None or hasattr(batch, "to"):
        return
    raise DataError(
        f"The first {what} batch holds no tensor: it is a {type(batch).__name__} ({batch!r:.80}). Return tensors "
        "from the data set or its collate_fn, or override transfer_batch_to_device for batches of another kind."
    )


def moves_own_types(module: TrainModule, datamodule: DataModule | None) -> bool:
    """Return whether the user brings batches to the device in a way of their own."""
    return any(overrides(one, "transfer_batch_to_device", DataHooks) for one in (module, datamodule))


def make_transfer(module: TrainModule, datamodule: DataModule | None, strategy: Strategy) -> Transfer | None:
    """Return what brings a batch to the device, through the hooks that somebody overrides; None for nothing to do.

    A hook of the data module goes before the module's of the same name.
    """
    hooks: dict[str, Any] = {}
    for name in _TRANSFER_HOOKS:
        owner = next((one for one in (datamodule, module) if one is not None and overrides(one, name, DataHooks)), None)
        hooks[name] = getattr(owner, name) if owner is not None else None
    before, move, after = (hooks[name] for name in _TRANSFER_HOOKS)
    precision = strategy.precision
    if not any((before, move, after)) and strategy.device.type == "cpu" and precision.param_dtype is None:
        return None

    def transfer(batch: Any, dataloader_idx: int) -> Any:
        if before is not None:
            batch = before(batch, dataloader_idx)
        batch = precision.convert_batch(batch)
        batch = strategy.batch_to_device(batch) if move is None else move(batch, strategy.device, dataloader_idx)
        batch = after(batch, dataloader_idx) if after is not None else batch
        if batch is None:
            raise ModuleError(
                f"{' and '.join(name for name, hook in hooks.items() if hook is not None)} must return the batch, got "
                "None; return it."
            )
        return batch

    return transfer
