"""Saving a checkpoint of a run in this process."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import torch

from ...callbacks.helpers.loggers import tell_loggers
from ...common.errors import CheckpointError, RunError
from ...common.storage import AnyPath, as_path
from ..checkpoint import list_checkpoints
from ..checkpoint.manifest import Origin
from ..checkpoint.single_file import SingleFile
from ..session.interruption import interrupted_inside
from ..session.session import Session
from .after_restart import note_checkpoint
from .run_state import still_parts, take_state


def save_checkpoint(
    session: Session, path: AnyPath, *, weights_only: bool, wait: bool, single_file: SingleFile | None
) -> None:
    """Write a checkpoint of a run in this process. Collective: every rank calls it.

    Raises:
        RunError: before the run has everything that a checkpoint holds, inside an optimizer step, and after an error
            with several ranks.
    """
    if not session.is_built:
        raise RunError(
            f"save_checkpoint({str(path)!r}) was called before this {session.task} had set up its module and "
            "optimizers, or after that failed; call it in on_fit_start or later, or after a run that got that far."
        )
    if session.has_failed and session.strategy.world_size > 1:
        raise RunError(
            f"save_checkpoint({str(path)!r}) was called after an error on rank {session.strategy.rank} of "
            f"{session.strategy.world_size}: the other ranks may not join in saving; resume from the last checkpoint "
            "that a ModelCheckpoint has saved (ckpt_path='last')."
        )
    if session.progress.is_in_step and not (weights_only or session.has_failed):
        raise RunError(
            f"save_checkpoint({str(path)!r}) was called inside an optimizer step (micro-batch "
            f"{session.progress.batch_idx} of epoch {session.state.epoch}): a resumed run would not train on its "
            "samples. Call it in on_train_step_end, or pass weights_only=True."
        )
    # a validation runs in inference mode, and no later save could write to tensors made in it
    inference = torch.inference_mode(False)
    with session.saves.waiting(), inference, torch.no_grad(), session.profiler.profile("checkpoint"):
        origin = origin_of(session, path.parent)
        state = take_state(session, weights_only=weights_only or session.task != "fit")
        if session.strategy.rank == 0:
            tell_loggers(session.loggers, "save")
        session.held.wake_mirrors()
        mesh, still = session.strategy.mesh_axes, still_parts(session)
        session.writer.save(path, state, mesh=mesh, still=still, origin=origin, single_file=single_file)
        if session.writer.upload is not None:
            session.writer.upload.step = session.state.global_step
        if wait:
            session.writer.close()
    if "loop" in state:
        session.saves.note(path)
        note_checkpoint(session, path)
        if session.saved_list is not None and session.strategy.rank == 0:
            with session.saved_list.open("a", encoding="utf-8") as file:
                print(json.dumps(str(path)), file=file)


def origin_of(session: Session, folder: AnyPath | None = None) -> Origin:
    """Return the lineage of a run, and a time later than that of each checkpoint that it has saved or resumed from.

    With a `folder`, the time is also later than that of each checkpoint in it, when the run first writes there: a clock
    that was set back, or another machine's, does not make an older checkpoint the last one.
    """
    if folder is not None and session.strategy.rank == 0 and session.saves.is_first_in(folder):
        with suppress(CheckpointError):  # if the folder cannot be read, the save reports it on all ranks
            for checkpoint in list_checkpoints(folder):
                session.origin = session.origin.not_before(checkpoint.saved_at)
    session.origin = session.origin.after()
    return session.origin


def newest_saved(saved_list: Path) -> AnyPath | None:
    """Return the newest existing checkpoint in a list of those that a run has begun to write."""
    lines = saved_list.read_text(encoding="utf-8").splitlines() if saved_list.exists() else []
    return next((path for line in reversed(lines) if _is_there(path := as_path(json.loads(line)))), None)


def point_to_checkpoint(error: BaseException, path: AnyPath | None) -> None:
    """Add a note to an error that ended a run, with the checkpoint to resume from, if there is one."""
    if isinstance(error, KeyboardInterrupt) and not error.args:
        interrupted_inside(error, path)
    if path is not None and _is_there(path) and isinstance(error, Exception):
        error.add_note(f"The last checkpoint is {str(path)!r}: resume with fit(..., ckpt_path={str(path)!r}).")


def _is_there(path: AnyPath) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
