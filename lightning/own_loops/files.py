"""Files of Lightning's Fabric and of torch.save: tensors and plain values, into objects of any strategy."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch.optim import Optimizer

from ...common.errors import CheckpointError, ConfigError
from ...common.storage import AnyPath
from ...strategies.state.dtensor import is_dtensor
from ...trainer.engine.saved_objects import Owner, put_back
from ..checkpoint_files import read_torch_file


def load_file(
    path: str | AnyPath,
    objects: MutableMapping[str, Any] | None,
    owner: Owner,
    *,
    strict: bool,
    content: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Restore objects from their entries in a file, and return the rest. Collective: every rank calls it.

    Args:
        path: the file.
        objects: the objects, by name.
        owner: returns the strategy of an object that was set up.
        strict: whether all weights must fit, and all objects be in the file.
        content: what the file holds, if it was read before.

    Raises:
        CheckpointError: for what does not fit.
        ConfigError: for a sharded optimizer, whose state such a file has by position.
    """
    saved = read_torch_file(path) if content is None else content
    if not isinstance(saved, dict):
        raise CheckpointError(f"{str(path)!r} must hold a dict, found {type(saved).__name__}; use load_raw.")
    found = {name: value for name, value in (objects or {}).items() if strict or name in saved}
    optimizers = {name: value for name, value in found.items() if isinstance(value, Optimizer) and owner(value)}
    for name, optimizer in optimizers.items():
        placed = owner(optimizer)
        if placed is not None and any(is_dtensor(p) for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                f"{name!r} in {str(path)!r} is the state of an optimizer by position, which strategy="
                f"{placed.site.name!r} cannot place; load the module alone, or from a checkpoint of Echelon."
            )
        if name in saved:
            optimizer.load_state_dict(saved.pop(name))
            del found[name]
    put_back(found, saved, owner, strict=strict)
    if objects is not None:
        objects.update(found)
    return saved
