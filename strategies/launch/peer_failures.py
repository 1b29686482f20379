"""Errors that name the rank at fault, for ranks without a common agent."""

from __future__ import annotations

from typing import Final

from ...common.errors import ProcessError
from ..distributed.noticeboard import Messages, Noticeboard
from ..distributed.process_group import ProcessGroup
from .failures import blames_a_peer

_TIMEOUT: Final = 2.0  # seconds for the other ranks to post their errors
_LONGEST: Final = 300


def blame_peer(group: ProcessGroup | None, error: BaseException) -> ProcessError | None:
    """Post this rank's error for the other ranks; if another rank is at fault, return an error that names it.

    A rank whose peer has died gets only gloo's "Connection closed by peer", which names an address. So each rank posts
    its error before it ends, and reads those of the others; a rank that posts nothing was killed.
    """
    if group is None or group.is_fake:  # there are no others
        return None
    group.has_failed = True
    is_consequence = blames_a_peer(error)
    board = Noticeboard(group.store, "errors")
    try:
        board.post(str(group.rank), None if is_consequence else f"{type(error).__name__}: {error}"[:_LONGEST])
        if not is_consequence:
            return None
        ranks = [str(rank) for rank in range(group.world_size)]
        errors = board.wait_for(ranks, _TIMEOUT, until=lambda errors: any(errors.values()))
    except RuntimeError:
        return ProcessError(
            f"Rank {group.rank} of {group.world_size} lost the others: the store of the run is gone, because rank 0 or "
            "the launcher has ended; see their output."
        )
    failed, reason = _find_culprits(ranks, errors)
    if not failed:
        return None
    reason = reason.removesuffix(".")
    message = f"Rank {group.rank} of {group.world_size} lost the others: {reason}. See the output there."
    return ProcessError.of_ranks(message, *map(int, failed))


def _find_culprits(ranks: list[str], errors: Messages) -> tuple[list[str], str]:
    """Return the ranks at fault, and what happened to them."""
    failed = [rank for rank, error in errors.items() if error]
    if failed:
        return failed, "; ".join(f"rank {rank} failed with {errors[rank]}" for rank in failed)
    silent = [rank for rank in ranks if rank not in errors]
    return silent, f"rank {', '.join(silent)} ended without an error; it was killed or left before the others"
