"""Saving a checkpoint of a run in this process."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

from ...callbacks.helpers.loggers import tell
from ..session.session import Session
from .after_restart import note_checkpoint
from .run_state import still_parts, take_state


def save_checkpoint(session: Session, path: Path, *, weights_only: bool, wait: bool) -> None:
    """Write a checkpoint of a run in this process. Collective: every rank calls it."""
    began = monotonic()
    with session.profiler.profile("checkpoint"):
        state = take_state(session, weights_only=weights_only or session.task != "fit")
        if session.strategy.rank == 0:
            tell(session.loggers, "save")
        session.writer.save(path, state, still=still_parts(session))
        if wait:
            session.writer.close()
    session.progress.checkpoint_seconds += monotonic() - began
    if "loop" in state:
        session.progress.last_checkpoint = path
        note_checkpoint(session, path)
