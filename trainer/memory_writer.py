"""Snapshots of a session in memory: taking one."""

from __future__ import annotations

import time

from .checkpoint import MemoryWriter
from .session import Session
from .snapshot import take_state


def take_snapshot(session: Session, writer: MemoryWriter) -> None:
    """Take a snapshot of the run into memory, while training goes on. Collective: every rank calls it.

    To be called where a checkpoint may be saved. Nothing that goes wrong with the snapshot is raised.
    """
    with session.profiler.record("snapshot"):
        # the time of this thread, not of waiting for other ranks: they would come as late to the next step
        began = time.thread_time()
        state = take_state(session, weights_only=False)
        writer.save(state, session.state.global_step, spent=time.thread_time() - began)
