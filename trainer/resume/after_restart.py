"""Resuming after a restart of the workers: from the newest surviving state, in the same folders."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...common.errors import CheckpointError
from ...common.storage import AnyPath, as_path
from ...strategies.state.schema import COUNT, check_schema
from .. import checkpoint
from ..checkpoint.on_nodes.on_disk import is_part
from ..loggers.base import continue_loggers
from ..session.session import RestartableFit, Session

if TYPE_CHECKING:
    from ...strategies.resilience.supervisor import Supervisor

_KEPT: Final = 10
"""Number of checkpoints to remember; all but the newest few are deleted over time."""

_FITS: Final = itertools.count()
"""Counts the fits of this process: a program with several repeats all of them in each round."""

_log = logging.getLogger("echelon")


@dataclass(frozen=True)
class _Notes:
    """The notes of earlier rounds about a fit."""

    seed: int
    data_size: int
    versions: list[int | str | None]
    """The versions of its loggers: where they write."""
    owns_snapshots: bool
    """Whether the snapshots in memory are its own: they belong to the fit that was running."""
    step: int
    """The step of its newest valid checkpoint; -1 if there is none."""
    checkpoint: AnyPath | None


def go_on(session: Session) -> AnyPath | None:
    """Return the newest state of a restarted run, in memory or on disk, and make it log where it logged before.

    None for another run. A run that had saved nothing yet keeps its folders and starts again. In a program with several
    fits, so does one that had ended without a checkpoint. Collective: every rank calls it, before loggers are opened.
    """
    strategy = session.strategy
    supervisor: Supervisor | None = strategy.launcher.supervisor
    if supervisor is None:
        return None
    recovery = session.recovery = RestartableFit(next(_FITS), checkpoint.MemoryWriter(supervisor.snapshots))
    in_memory = supervisor.snapshots.agree(strategy.ranks.all.on_first_rank(partial(_read_returns, supervisor)))
    least = -1 if in_memory is None else in_memory.step
    known = strategy.ranks.all.on_first_rank(partial(_begun_checkpoints, supervisor, recovery.fit))
    if known and strategy.ranks.all.spans_nodes:
        from ..checkpoint.on_nodes.gathering import newest_complete

        newest = newest_complete(known, strategy.ranks.all, may_start=least >= 0)
        known = [] if newest is None else known[known.index(newest) :]
    verify = partial(checkpoint.check_complete, takes_part=strategy.ranks.all.spans_nodes)
    notes = strategy.ranks.all.on_first_rank(partial(_recall_notes, supervisor, recovery.fit, least, known, verify))
    if notes is None:
        supervisor.snapshots.clear()
        return None
    recovery.is_restarted = True
    # a run that has saved nothing would otherwise choose new ones
    session.state.seed, session.state.data_size = notes.seed, notes.data_size
    continue_loggers(session.loggers, notes.versions)
    step, path = notes.step, notes.checkpoint
    session.saves.note(path)
    if in_memory is not None and notes.owns_snapshots and in_memory.step >= step:
        step, path = in_memory.step, in_memory.path
    if strategy.rank == 0:
        _note_return(supervisor, recovery.fit, 0 if path is None else step)
        start = session.resumed_from if path is None else path
        where = "the beginning" if start is None else f"step {step}, {start}"
        _log.warning("Round %d of the run resumes from %s", supervisor.round.number, where)
    return path


def note_run(session: Session, versions: Sequence[int | str | None]) -> None:
    """Record for later rounds where this run logs, and what it began with."""
    strategy, recovery = session.strategy, session.recovery
    supervisor: Supervisor | None = strategy.launcher.supervisor
    if supervisor is None or recovery is None or recovery.is_restarted or strategy.rank:
        return
    from ...strategies.resilience.rounds import RUN_FOLDER

    state = {"seed": session.state.seed, "data_size": strategy.data_size}
    supervisor.notices.post(f"run/{recovery.fit}", {"versions": list(versions), **state})
    supervisor.notices.post(RUN_FOLDER, str(Path(session.run.log_dir).absolute()))
    supervisor.notices.post("fit", recovery.fit)


def note_end(session: Session) -> None:
    """Tell the agent whether this round trained to the end, or was asked to end because nodes join or leave."""
    supervisor: Supervisor | None = session.strategy.launcher.supervisor
    if supervisor is not None and session.interruption.is_requested:
        supervisor.cut_short()


def note_checkpoint(session: Session, path: AnyPath) -> None:
    """Record for later rounds that there is, or soon will be, a checkpoint that they can resume from."""
    recovery = session.recovery
    supervisor: Supervisor | None = session.strategy.launcher.supervisor
    if supervisor is not None and recovery is not None and session.strategy.rank == 0:
        name = f"checkpoints/{recovery.fit}"
        known = [one for one in supervisor.notices.read(name) or [] if one != str(path.absolute())]
        supervisor.notices.post(name, [*known, str(path.absolute())][-_KEPT:])


def _read_returns(supervisor: Supervisor) -> list[tuple[int, int]]:
    """Return the rounds of the fit that was running, and the step that each resumed from."""
    fit = supervisor.notices.read("fit")
    return [(number, step) for number, step in supervisor.notices.read(f"returns/{fit}") or []]


def _note_return(supervisor: Supervisor, fit: int, step: int) -> None:
    """Record for later rounds which step this one resumes from; the logs of later steps are dropped and redone.

    A node that others believed lost may come back with newer snapshots, which belong to a different history of the run.
    """
    name = f"returns/{fit}"
    known = [one for one in supervisor.notices.read(name) or [] if one[1] < step]  # this one implies the others
    supervisor.notices.post(name, [*known, (supervisor.round.number, step)])


def _begun_checkpoints(supervisor: Supervisor, fit: int) -> list[AnyPath]:
    """Return the checkpoints that a fit has begun to write, from the newest on."""
    return [as_path(name) for name in reversed(supervisor.notices.read(f"checkpoints/{fit}") or [])]


def _recall_notes(
    supervisor: Supervisor, fit: int, in_memory: int, paths: Sequence[AnyPath], verify: Callable[[AnyPath], None]
) -> _Notes | None:
    """Return the notes of earlier rounds about a fit, given the step of the snapshots in memory; None if none."""
    known = supervisor.notices.read(f"run/{fit}")
    if known is None:
        return None
    owns_snapshots = supervisor.notices.read("fit") == fit
    step, path = _newest_valid(paths, in_memory if owns_snapshots else -1, verify)
    return _Notes(known["seed"], known["data_size"], known["versions"], owns_snapshots, step, path)


def _newest_valid(
    paths: Sequence[AnyPath], least: int, verify: Callable[[AnyPath], None]
) -> tuple[int, AnyPath | None]:
    """Return the newest one of these checkpoints that is valid, as `verify` says, and its step; (-1, None) for none.

    A checkpoint of a step before `least` is not read in full to verify it, since there is a better state.

    Raises:
        CheckpointError: if of one only a node's part is here, and there is no other state.
    """
    fault: CheckpointError | None = None
    for path in paths:
        try:
            loop = checkpoint.load(path, parts=("loop",))["loop"]
            check_schema(loop, {"global_step": COUNT}, f"The training state in {path}")
            step = int(loop["global_step"])
            if step > least:
                verify(path)
        except CheckpointError as error:  # deleted since, or being written when its rank died
            _log.info("%s", error)
            fault = fault or (error if is_part(path) else None)
        else:
            return step, path
    if fault is not None and least < 0:
        raise fault
    return -1, None
