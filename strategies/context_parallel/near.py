"""NearTokens: the tokens of other ranks that the tokens of a part reach within a window, and their exchange."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from ..distributed.tensor_collectives import Wire, all_to_all_of
from .sequence import SequenceLayout

_WORTH_IT: Final = 0.75


@dataclass(frozen=True)
class NearTokens:
    """Which tokens each rank needs of each other.

    Args:
        cut: how sequences are cut.
        length: of the whole sequence.
        reach: a token attends to those that are fewer than this away.
        is_causal: whether it attends to itself and earlier ones only.
    """

    cut: SequenceLayout
    length: int
    reach: int
    is_causal: bool

    @property
    def saves(self) -> bool:
        """Whether ranks need so few of all tokens that it is worth it to choose them."""
        return _plan(self, torch.device("cpu")).saves

    def columns(self, device: torch.device) -> Tensor:
        """Return the places of the tokens that this rank needs, its own among them, in order."""
        return _plan(self, device).needed

    def exchange(self, wire: Wire, part: Tensor, dim: int) -> Tensor:
        """Return the needed tokens, in order, given each rank's part. Collective, and so is its backward."""
        plan = _plan(self, part.device)
        rows = part.movedim(dim, 0)
        sent = rows.index_select(0, plan.sent)
        width = rows[0].numel()
        flat = all_to_all_of(wire, sent.reshape(-1), [n * width for n in plan.to], [n * width for n in plan.from_])
        got = torch.cat([flat.view(-1, *rows.shape[1:]), rows])
        return got.index_select(0, plan.order).movedim(0, dim)


@dataclass(frozen=True)
class _Plan:
    saves: bool
    needed: Tensor
    """The places of the tokens that this rank needs, in order."""
    sent: Tensor
    """The rows of this rank's part that it sends, those to each other rank after each other."""
    to: tuple[int, ...]
    """How many it sends to each rank."""
    from_: tuple[int, ...]
    """How many it gets from each rank."""
    order: Tensor
    """Where, in what it got followed by its own part, each needed token is."""


@lru_cache(maxsize=16)
def _plan(near: NearTokens, device: torch.device) -> _Plan:
    cut, ranks = near.cut, range(near.cut.size)
    needed = [_is_needed(near, rank) for rank in ranks]
    owned = [cut.positions(near.length, rank=rank) for rank in ranks]
    own = owned[cut.rank]
    wanted = [needed[rank][own].nonzero()[:, 0] if rank != cut.rank else own[:0] for rank in ranks]
    coming = [owned[rank][needed[cut.rank][owned[rank]]] if rank != cut.rank else own[:0] for rank in ranks]
    arrived, where = torch.cat([*coming, own]), torch.zeros(near.length, dtype=torch.long)
    where[arrived] = torch.arange(len(arrived))
    places = needed[cut.rank].nonzero()[:, 0]
    return _Plan(
        sum(int(each.sum()) for each in needed) <= _WORTH_IT * near.length * cut.size,
        places.to(device),
        torch.cat(wanted).to(device),
        tuple(map(len, wanted)),
        tuple(map(len, coming)),
        where[places].to(device),
    )


def _is_needed(near: NearTokens, rank: int) -> Tensor:
    """Return, for each token of the whole, whether a rank needs it."""
    found, after = torch.zeros(near.length, dtype=torch.bool), 0 if near.is_causal else near.reach - 1
    for start, stop in near.cut.chunks(near.length, rank):
        if start < stop:
            found[max(start - near.reach + 1, 0) : stop + after] = True
    return found
