"""Attributes of a module or data module that finders set, such as ``lr`` and ``batch_size``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..module.hparams import HyperparametersMixin, set_unsaved

Owner = HyperparametersMixin | None


def find_attribute(owners: Sequence[Owner], names: Sequence[str]) -> str | None:
    """Return the first of these names that an owner, or its ``hparams``, has as an attribute; None if none does."""
    return next((name for name in names if any(True for _ in _find_holders(owners, name))), None)


def set_attribute(owners: Sequence[Owner], name: str, value: object, *, is_saved: bool = True) -> None:
    """Set an attribute of owners and their ``hparams``; with `is_saved`, also in the ``hparams`` of checkpoints."""
    for owner, is_hparams in list(_find_holders(owners, name)):
        if is_hparams:
            _set_item(owner, name, value, is_saved=is_saved)
        else:
            setattr(owner, name, value)


def _set_item(owner: HyperparametersMixin, name: str, value: object, *, is_saved: bool) -> None:
    if not is_saved:
        set_unsaved(owner, name, value)
        return
    owner.hparams[name] = value
    saved = vars(owner).get("_hparams_initial")
    if saved is not None and name in saved:
        saved[name] = value


def _find_holders(owners: Sequence[Owner], name: str) -> Iterator[tuple[Any, bool]]:
    """Yield each object that has an attribute, and whether it is the ``hparams`` of an owner."""
    for owner in owners:
        if owner is None:
            continue
        if hasattr(owner, name):
            yield owner, False
        if name in owner.hparams:
            yield owner, True
