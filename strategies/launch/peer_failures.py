"""Which rank brought a run down, told by those that lost it: for processes that nobody watches together."""

from __future__ import annotations

import time
from typing import Any, Final

from ..distributed.process_group import ProcessGroup
from ..errors import ProcessError

_PATIENCE: Final = 2.0
_LONGEST: Final = 300


def last_words(group: ProcessGroup, error: BaseException) -> ProcessError | None:
    """Tell the other ranks of an error of this one; return one that names the culprit, if that is another rank.

    A rank whose peer is gone gets no more than gloo's "Connection closed by peer", which names an address. So each rank
    leaves a word in the store of the run before it ends, and reads those of the others; who leaves none was killed.
    """
    from .failures import blames_a_peer

    is_consequence = blames_a_peer(error)
    words = f"{type(error).__name__}: {error}"[:_LONGEST] if not is_consequence else ""
    try:
        group.store.set(_key(group.rank), words)
        if not is_consequence:
            return None
        found = _read(group)
    except RuntimeError:
        return ProcessError(
            f"Rank {group.rank} of {group.world_size} lost the others: the store of the run is gone, and with it rank "
            "0 or the launcher; see their output."
        )
    return _explain(group, found)


def _key(rank: int) -> str:
    return f"last words/{rank}"


def _read(group: ProcessGroup) -> dict[int, str]:
    """Return the words of the ranks that have left some, once all have or patience is over."""
    keys = {rank: _key(rank) for rank in range(group.world_size)}
    end = time.monotonic() + _PATIENCE
    store: Any = group.store
    while True:
        found = {rank: store.get(key).decode() for rank, key in keys.items() if store.check([key])}
        if len(found) == len(keys) or any(found.values()) or time.monotonic() > end:
            return found
        time.sleep(0.05)


def _explain(group: ProcessGroup, found: dict[int, str]) -> ProcessError | None:
    failed = [f"rank {rank} failed with {words}" for rank, words in found.items() if words]
    silent = [str(rank) for rank in range(group.world_size) if rank not in found]
    if failed:
        reason = "; ".join(failed)
    elif silent:
        reason = f"rank {', '.join(silent)} ended without a word; it was killed, or left before the others"
    else:
        return None
    return ProcessError(f"Rank {group.rank} of {group.world_size} lost the others: {reason}. See the output there.")
