"""Taking snapshots of a run into memory, for elastic strategies."""

from __future__ import annotations

import time

from ...callbacks.helpers.loggers import tell_loggers
from ..session.session import Session
from .run_state import still_parts, take_state
from .save import origin_of


def take_snapshot(session: Session) -> None:
    """Take a snapshot of an elastic run into memory, while training continues. Collective: every rank calls it.

    Call it where a checkpoint may be saved. Errors of the snapshot are not raised.
    """
    recovery = session.recovery
    if recovery is None:
        return
    with session.saves.waiting(), session.profiler.profile("snapshot"):
        began = time.monotonic()
        # data that loggers buffer would be lost with this process, and the resumed run does not log it again
        if session.strategy.rank == 0:
            tell_loggers(session.loggers, "save")
        with session.saves.taking_snapshot():
            origin = origin_of(session)
            state = take_state(session, weights_only=False)
        gathering, snapshots = time.monotonic() - began, recovery.snapshots
        still, step = still_parts(session), session.state.global_step
        snapshots.save(state, step, still=still, gathering=gathering, origin=origin)
        if snapshots.is_copying:
            session.writer.also_wait(snapshots.wait_for_copy)


def end_snapshots(session: Session, *, has_failed: bool) -> None:
    """Wait until the snapshot in progress is complete; after a failure, only briefly."""
    if session.recovery is not None:
        if has_failed:
            session.recovery.snapshots.abandon()
        session.recovery.snapshots.close()
