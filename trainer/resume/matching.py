"""Schedulers of a run, matched with saved ones by their optimizers, which may be in another order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...strategies.state.optimizer_groups import Sources
from ..session.session import Session


def optimizers_of_schedulers(session: Session) -> list[int | None]:
    """Return the index of each scheduler's optimizer; None for a scheduler without one of the run's."""
    index: dict[object, int] = {optimizer: index for index, optimizer in enumerate(session.optimizers)}
    return [index.get(getattr(config.scheduler, "optimizer", None)) for config in session.schedulers]


def match_schedulers(session: Session, state: Mapping[str, Any], order: Sequence[int]) -> list[int]:
    """Return the index of each scheduler's saved state: the next one of its optimizer, if that is known of all.

    Args:
        session: the run.
        state: the saved one.
        order: the index of the saved state of each optimizer.
    """
    saved = state.get("lr_scheduler_optimizers", ())
    here = [None if index is None else order[index] for index in optimizers_of_schedulers(session)]
    if len(saved) != len(here) or sorted(map(str, saved)) != sorted(map(str, here)):
        return list(range(len(here)))
    left, found = list(range(len(here))), []
    for optimizer in here:
        found.append(next(index for index in left if saved[index] == optimizer))
        left.remove(found[-1])
    return found


def changed_order(sources: Sources, num_saved: int) -> Sources:
    """Return the saved groups of an optimizer's groups; empty if each is its own."""
    return () if list(sources) == list(range(num_saved)) else sources
