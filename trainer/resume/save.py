"""Saving a checkpoint of a run in this process."""

from __future__ import annotations

from pathlib import Path
from time import monotonic

import torch

from ...callbacks.helpers.loggers import tell
from ...strategies.errors import RunError
from ..session.session import Session
from .after_restart import note_checkpoint
from .run_state import still_parts, take_state


def save_checkpoint(session: Session, path: Path, *, weights_only: bool, wait: bool) -> None:
    """Write a checkpoint of a run in this process. Collective: every rank calls it.

    Raises:
        RunError: before the run has all that a checkpoint holds, inside an optimizer step, and after an error where
            there are several ranks.
    """
    if not session.is_built:
        raise RunError(
            f"save_checkpoint({str(path)!r}) was called before this {session.task} had its module and optimizers, or "
            "after an error in that; call it from on_fit_start on, or after a run that has come so far."
        )
    if session.has_failed and session.strategy.world_size > 1:
        raise RunError(
            f"save_checkpoint({str(path)!r}) was called after an error on rank {session.strategy.rank} of "
            f"{session.strategy.world_size}: the other ranks may not come to save with it; resume from the last "
            "checkpoint that a ModelCheckpoint has saved (ckpt_path='last')."
        )
    if session.progress.is_in_step and not (weights_only or session.has_failed):
        raise RunError(
            f"save_checkpoint({str(path)!r}) was called inside an optimizer step (micro-batch "
            f"{session.progress.batch_idx} of epoch {session.state.epoch}): a resumed run would not train on its "
            "samples. Call it in on_train_step_end, or pass weights_only=True."
        )
    began = monotonic()
    # in a validation there is inference mode, whose tensors no later save could write to
    with torch.inference_mode(False), torch.no_grad(), session.profiler.profile("checkpoint"):
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
