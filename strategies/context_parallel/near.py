"""NearTokens: the tokens of other ranks that the tokens of a part attend to, and their exchange."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from ..distributed.tensor_collectives import Wire, all_to_all_of
from .sequence import SequenceLayout

_WORTH_IT: Final = 0.75


class NearTokens:
    """Which tokens each rank needs of each other.

    Args:
        cut: how sequences are cut.
        needed: for each rank, True for the tokens of the whole that it needs, its own among them; on the CPU, and the
            same on all ranks.
    """

    def __init__(self, cut: SequenceLayout, needed: Sequence[Tensor]) -> None:
        length, ranks = len(needed[0]), range(cut.size)
        owned = [cut.positions(length, rank=rank) for rank in ranks]
        own = owned[cut.rank]
        wanted = [needed[rank][own].nonzero()[:, 0] if rank != cut.rank else own[:0] for rank in ranks]
        coming = [owned[rank][needed[cut.rank][owned[rank]]] if rank != cut.rank else own[:0] for rank in ranks]
        arrived, where = torch.cat([*coming, own]), torch.zeros(length, dtype=torch.long)
        where[arrived] = torch.arange(len(arrived))
        self._places = needed[cut.rank].nonzero()[:, 0]
        self._sent = torch.cat(wanted)
        """The rows of this rank's part that it sends, those to each other rank after each other."""
        self._order = where[self._places]
        """Where, in what it got followed by its own part, each needed token is."""
        self._to, self._from = [*map(len, wanted)], [*map(len, coming)]
        self.saves = sum(int(each.sum()) for each in needed) <= _WORTH_IT * length * cut.size
        """Whether ranks need so few of all tokens that it is worth it to choose them."""

    def columns(self, device: torch.device) -> Tensor:
        """Return the places of the tokens that this rank needs, its own among them, in order."""
        self._move(device)
        return self._places

    def exchange(self, wire: Wire, part: Tensor, dim: int) -> Tensor:
        """Return the needed tokens, in order, given each rank's part. Collective, and so is its backward."""
        self._move(part.device)
        rows = part.movedim(dim, 0)
        sent = rows.index_select(0, self._sent)
        width = rows[0].numel()
        flat = all_to_all_of(wire, sent.reshape(-1), [n * width for n in self._to], [n * width for n in self._from])
        got = torch.cat([flat.view(-1, *rows.shape[1:]), rows])
        return got.index_select(0, self._order).movedim(0, dim)

    def _move(self, device: torch.device) -> None:
        self._places, self._sent, self._order = (each.to(device) for each in (self._places, self._sent, self._order))


@lru_cache(maxsize=16)
def tokens_in_window(cut: SequenceLayout, length: int, window: int, *, is_causal: bool) -> NearTokens:
    """Return the tokens that are fewer than `window` away from a rank's own; earlier ones only if causal."""
    return NearTokens(cut, [_in_window(cut, length, rank, window, is_causal) for rank in range(cut.size)])


def tokens_of_documents(
    cut: SequenceLayout, document_ids: Tensor, window: int | None = None, *, is_causal: bool
) -> NearTokens | None:
    """Return the tokens that share a document with a rank's own in any sequence of a batch; None if it does not save.

    Args:
        cut: how sequences are cut.
        document_ids: of the whole sequences, shape (batch, tokens).
        window: tokens are fewer than this away.
        is_causal: only earlier ones.
    """
    length = document_ids.shape[1]
    first = _first_of_document(document_ids)
    found = []
    for rank in range(cut.size):
        needed = torch.zeros(length, dtype=torch.bool, device=document_ids.device)
        for start, stop in cut.chunks(length, rank):
            has = torch.zeros_like(first, dtype=torch.bool).scatter_(1, first[:, start:stop], value=True)
            shared = has.gather(1, first).any(0)
            if is_causal:
                shared[stop:] = False
            needed |= shared
        found.append(needed)
    needed_by = torch.stack(found).cpu()  # one wait for the device
    if window is not None:
        needed_by &= torch.stack([_in_window(cut, length, rank, window, is_causal) for rank in range(cut.size)])
    near = NearTokens(cut, needed_by.unbind())
    return near if near.saves else None


def _first_of_document(document_ids: Tensor) -> Tensor:
    """Return, for each token, the place of the first one with its document id."""
    ids, places = document_ids.sort(dim=1, stable=True)
    begins = ids.diff(dim=1, prepend=ids[:, :1] - 1) != 0
    columns = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    begun = torch.where(begins, columns, 0).cummax(1).values
    return torch.empty_like(places).scatter_(1, places, places.gather(1, begun))


def _in_window(cut: SequenceLayout, length: int, rank: int, window: int, is_causal: bool) -> Tensor:
    """Return, for each token of the whole, whether it is in the window of one of a rank."""
    found, after = torch.zeros(length, dtype=torch.bool), 0 if is_causal else window - 1
    for start, stop in cut.chunks(length, rank):
        if start < stop:
            found[max(start - window + 1, 0) : stop + after] = True
    return found
