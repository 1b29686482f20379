"""Objects that a checkpoint cannot hold: left out with a warning, and created again when it is loaded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, MutableMapping
from typing import Any, Final

from ..common.errors import CheckpointError
from ..trainer.checkpoint.encoding import encode_value

KEPT_OUT: Final = "kept_out"
"""The key under which a checkpoint lists the objects left out, each as the path of names that leads to it."""

_OURS: Final = frozenset(
    {"state_dict", "optimizer_states", "lr_schedulers", "precision", "loop", "data", "metrics", "rng", KEPT_OUT}
)
"""The entries that cannot hold a library's objects; those of the strategy are sharded, and encoded by it."""


def keep_out(checkpoint: dict[str, Any]) -> None:
    """Remove from a checkpoint's state the objects that it cannot hold, with a warning: nothing is pickled.

    From a dict, only the items with such an object are removed; a list with one is removed as a whole, since half a
    list would be a different list.
    """
    places: list[list[object]] = []
    for name in [name for name in checkpoint if name not in _OURS]:
        _remove_unstorable(checkpoint, name, [name], places)
    if not places:
        return
    checkpoint[KEPT_OUT] = [*checkpoint.get(KEPT_OUT, []), *places]
    shown = ", ".join("".join(f"[{part!r}]" for part in place) for place in places)
    warnings.warn(
        f"The checkpoint is saved without {shown}: only a pickle could hold these objects. When it is loaded, the "
        "newly built module supplies its own.",
        stacklevel=3,
    )


def give_back(checkpoint: dict[str, Any], save: Callable[[dict[str, object]], None]) -> None:
    """Put back what was left out, as far as the module saves it now.

    Args:
        checkpoint: the loaded checkpoint.
        save: the ``on_save_checkpoint`` of the module being loaded.
    """
    places = checkpoint.get(KEPT_OUT)
    if not places:
        return
    known = {part: dict(value) if isinstance(value, dict) else value for part, value in checkpoint.items()}
    try:
        save(known)
    except Exception as error:  # noqa: BLE001 - anything may be missing in a module that no run has set up
        warnings.warn(
            f"The checkpoint was saved without {places}, and the module cannot give them outside a run "
            f"({type(error).__name__}: {error}); set them after loading.",
            stacklevel=3,
        )
        return
    for place in places:
        _copy_at_place(place, known, checkpoint)


def _remove_unstorable(
    holder: MutableMapping[Any, Any], name: object, place: list[Any], places: list[list[object]]
) -> None:
    value = holder[name]
    if _is_storable(value):
        return
    if not isinstance(value, dict) or not all(isinstance(key, str | int) for key in value):
        del holder[name]
        places.append(place)
        return
    plain = dict(value)  # also for a subclass, which the checkpoint would refuse; the module's own dict is not changed
    for key in list(plain):
        _remove_unstorable(plain, key, [*place, key], places)
    holder[name] = plain


def _is_storable(value: object) -> bool:
    try:
        encode_value(value, "", "")
    except CheckpointError:
        return False
    return True


def _copy_at_place(place: list[object], source: object, target: object) -> None:
    """Copy the value at a place in `source` to that place in `target`, if the place exists in both."""
    *parents, last = place
    for name in parents:
        if not isinstance(source, dict) or name not in source or not isinstance(target, dict):
            return
        source, target = source[name], target.setdefault(name, {})
    if isinstance(source, dict) and isinstance(target, dict) and last in source:
        target[last] = source[last]
