"""Lockstep: evaluation by strategies whose forward is collective, on ranks that have different numbers of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..session.session import Session
from .distributed_step import nothing_logged


def in_lockstep(
    session: Session, batches: Iterator[tuple[int, Any]], step_name: str, dataloader_idx: int, num_args: int
) -> Iterator[tuple[int, Any]]:
    """Yield this rank's batches, and run a discarded one as often as another rank has one and this one does not.

    It is the last one seen; a rank that has seen none gets another rank's. Collective: every rank iterates to the end.
    """
    strategy = session.strategy
    spare: tuple[int, Any] | None = None
    while True:
        item = next(batches, None)
        spare = spare if item is None else item
        owner = -strategy.world_size if item is None else -strategy.rank
        has_any, lacks_any, first = strategy.all_reduce(
            [float(item is not None), float(spare is None), float(owner)], "max"
        )
        if not has_any:
            return
        if lacks_any:
            shared = strategy.broadcast(item, src=-int(first))
            spare = shared if spare is None else spare
        if item is not None:
            yield item
            continue
        assert spare is not None
        batch_idx, batch = spare
        batch = batch if session.transfer is None else session.transfer(batch, dataloader_idx)
        with nothing_logged(session):
            strategy.run(step_name, *(batch, batch_idx, dataloader_idx)[:num_args])
