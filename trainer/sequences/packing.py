"""Plans of packs: which parts of which documents share a sequence of fixed length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

Method = Literal["concatenate", "first-fit", "best-fit-decreasing"]

Span = tuple[int, int, int]
"""A document, and the first token of a part of it and the one after its last."""


class PackPlan(NamedTuple):
    """The parts of documents in each pack, in memory that 24 bytes a part suffice for."""

    spans: Tensor
    """A row (document, start, stop) for each part, pack after pack."""
    starts: Tensor
    """The first row of each pack, and the number of rows."""

    def pack(self, number: int) -> list[list[int]]:
        """Return the rows of a pack."""
        start, stop = self.starts[number : number + 2].tolist()
        rows: list[list[int]] = self.spans[start:stop].tolist()
        return rows


def plan_packs(lengths: Sequence[int], order: Iterable[int], seq_len: int, method: Method, buffer: int) -> PackPlan:
    """Return the packs of the documents with these lengths, taken in an order.

    Args:
        lengths: tokens of each document, at least 1.
        order: the documents, each once.
        seq_len: tokens of a pack.
        method: ``"concatenate"`` joins all documents and cuts every `seq_len` tokens; ``"first-fit"`` puts each into
            the first open pack with room; ``"best-fit-decreasing"`` sorts each `buffer` documents and puts the longest
            first into the fullest pack that has room (Johnson 1973).
        buffer: the number of open packs, or of documents to sort.
    """
    rows: list[Span] = []
    starts = [0]
    for pack in PACKERS[method](lengths, order, seq_len, buffer):
        rows += pack
        starts.append(len(rows))
    return PackPlan(torch.tensor(rows, dtype=torch.int64).view(-1, 3), torch.tensor(starts, dtype=torch.int64))


def _concatenate_documents(
    lengths: Sequence[int], order: Iterable[int], seq_len: int, buffer: int
) -> Iterator[list[Span]]:
    pack: list[Span] = []
    room = seq_len
    for document in order:
        start, length = 0, lengths[document]
        while start < length:
            stop = min(length, start + room)
            pack.append((document, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield pack
                pack, room = [], seq_len
    if pack:
        yield pack


def _split_long_documents(lengths: Sequence[int], order: Iterable[int], seq_len: int) -> Iterator[Span]:
    """Yield documents whole, and those that fit into no pack in parts."""
    for document in order:
        for start in range(0, lengths[document], seq_len):
            yield document, start, min(start + seq_len, lengths[document])


def _first_fit(lengths: Sequence[int], order: Iterable[int], seq_len: int, buffer: int) -> Iterator[list[Span]]:
    opened: list[tuple[list[int], list[Span]]] = []  # the room of each, oldest first
    for span in _split_long_documents(lengths, order, seq_len):
        size = span[2] - span[1]
        place = next((place for place, (room, _) in enumerate(opened) if room[0] >= size), len(opened))
        if place == len(opened):
            if place == buffer:
                yield opened.pop(0)[1]
                place -= 1
            opened.append(([seq_len], []))
        room, pack = opened[place]
        pack.append(span)
        room[0] -= size
        if room[0] == 0:
            yield opened.pop(place)[1]
    yield from (pack for _, pack in opened)


def _best_fit(lengths: Sequence[int], order: Iterable[int], seq_len: int, buffer: int) -> Iterator[list[Span]]:
    parts = _split_long_documents(lengths, order, seq_len)
    while chunk := list(islice(parts, buffer)):
        chunk.sort(key=lambda span: span[1] - span[2])  # stable: equal ones stay in order
        packs: list[list[Span]] = []
        rooms: list[tuple[int, int]] = []  # ascending, with the number of the pack
        for span in chunk:
            size = span[2] - span[1]
            place = bisect_left(rooms, (size, 0))
            if place < len(rooms):
                room, number = rooms.pop(place)
            else:
                room, number = seq_len, len(packs)
                packs.append([])
            packs[number].append(span)
            insort(rooms, (room - size, number))
        yield from packs


PACKERS: Final[dict[Method, Callable[[Sequence[int], Iterable[int], int, int], Iterator[list[Span]]]]] = {
    "concatenate": _concatenate_documents,
    "first-fit": _first_fit,
    "best-fit-decreasing": _best_fit,
}
"""By the name of their method."""
