"""Note on tensors of a checkpoint that were quantized, and are not any more on this layout."""

from __future__ import annotations

import logging
from typing import Final

from ...strategies.distributed.nested import named_leaves
from ...strategies.state.lazy_tensor import StoredTensor
from ..session.session import Session

_SHOWN: Final = 3

_log = logging.getLogger("echelon")


def note_dequantized(session: Session, part: str, state: object) -> None:
    """Log which tensors of a part that was loaded are dequantized on some rank. Collective: every rank calls it.

    They are those of which a rank has now a part that ends inside a block of elements that are quantized together.
    """
    stored = [(name, leaf) for name, leaf in named_leaves(state) if isinstance(leaf, StoredTensor) and leaf.is_wrapped]
    collectives = session.strategy.ranks.all
    if not collectives.all_reduce(float(bool(stored)), "max"):
        return
    here = [name for name, leaf in stored if leaf.was_dequantized]
    names = sorted(set().union(*collectives.all_gather_object(here)))
    if names and session.strategy.rank == 0:
        shown = ", ".join(f"{part}{name}" for name in names[:_SHOWN])
        rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        _log.warning(
            "On this layout %d tensors of the checkpoint end inside a quantization block on some rank, which goes on "
            "with their values in full precision: %s%s. To keep them in few bits, resume on as many ranks as before, "
            "or on a number that divides their rows into whole blocks.",
            len(names),
            shown,
            rest,
        )
