"""Objects of a loop: the state that a checkpoint holds of them, and restoring it."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from ...common.errors import CheckpointError, ConfigError
from ...strategies.placed.placed import Placed
from ..checkpoint import compare_weights
from ..checkpoint.saved_state import explain_bad_part

OWN: Final = ("precision", "rng")
"""The entries that an `Engine` adds: the loss scale, and the random generators of each rank."""

Owner = Callable[[object], Placed | None]
"""Returns what an engine has set up of a module or an optimizer; None for anything else."""
Keeps = Callable[[str, Any], bool]
"""Returns whether a key and its value in the state of an object are saved."""


def check_names(state: object, function: str) -> None:
    """Check the names of the objects that a user saves or loads.

    Raises:
        ConfigError: unless it is a mapping whose keys are strings that the engine does not use itself.
    """
    if isinstance(state, str | Path):
        raise ConfigError(
            f"{function} must get the path first and then a dict of objects by name, got {str(state)!r:.80} for the "
            f"dict; write {function}({str(state)!r:.80}, {{'model': model, ...}})."
        )
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"{function} must get a dict of objects by name, got {state!r:.80}; write {{'model': model, ...}}."
        )
    for name in state:
        if not isinstance(name, str) or name in OWN:
            raise ConfigError(
                f"{function} must get names that are strings other than {' and '.join(OWN)}, which the engine adds "
                f"itself, got {name!r}; choose another name."
            )


def state_of(value: Any, owner: Owner, sync: Callable[[Placed], None]) -> object:
    """Return the saved form of a value; `sync` makes a module's replicas equal. Collective: every rank calls it."""
    placed = owner(value)
    if placed is None:
        return value.state_dict() if _is_stateful(value) else value
    if isinstance(value, Optimizer):
        return placed.optimizer_state(_unwrap_optimizer(value))
    sync(placed)
    return placed.model_state()


def put_back(objects: MutableMapping[str, Any], saved: MutableMapping[str, Any], owner: Owner, *, strict: bool) -> None:
    """Restore objects from their entries in `saved`, and remove those. Collective: every rank calls it.

    A value without ``load_state_dict`` is replaced in `objects`.

    Raises:
        CheckpointError: if one does not fit, or was not saved.
    """
    missing = [name for name in objects if name not in saved]
    if missing:
        raise CheckpointError(
            f"The checkpoint has no part {missing[0]!r}, but {sorted(saved)}; load what it has, or save it under this "
            "name."
        )
    for name, value in objects.items():
        state = saved.pop(name)
        placed = owner(value)
        if placed is None and not _is_stateful(value):
            objects[name] = state
        elif isinstance(value, nn.Module):
            _load_module(name, value, placed, state, strict=strict)
        else:
            with explain_bad_part(name):
                if placed is None:
                    value.load_state_dict(state)
                else:
                    placed.load_optimizer_state(_unwrap_optimizer(value), state)


def _load_module(
    name: str, module: nn.Module, placed: Placed | None, state: Mapping[str, object], *, strict: bool
) -> None:
    try:
        if placed is None:
            module.load_state_dict(state, strict=strict)
        else:
            placed.load_model_state(state, strict=strict)
    except (RuntimeError, TypeError, AttributeError) as error:
        found = compare_weights(module, state) if isinstance(state, Mapping) else error
        raise CheckpointError(
            f"The part {name!r} of the checkpoint does not fit {type(module).__name__}; build it as it was, or pass "
            f"strict=False.\n{found or error}"
        ) from error


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside the one that the user holds."""
    return vars(optimizer).get("optimizer", optimizer)  # type: ignore[no-any-return]


def items_of(saved: Mapping[str, Any], name: str) -> ItemsView[str, object]:
    """Return the items of a state to filter.

    Raises:
        ConfigError: if there is none of this name.
    """
    if not isinstance(saved.get(name), Mapping):
        raise ConfigError(
            f"filter must name modules and other objects with a state among {sorted(saved)}, got {name!r}; give one of "
            "those."
        )
    return saved[name].items()  # type: ignore[no-any-return]
