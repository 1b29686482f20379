"""PackedStream: packs of the documents of a stream, made while it is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from ...common.errors import DataError
from ..streams.stated import saves_state
from .packing import PACKERS, Method, Span

Document = tuple[Tensor, Tensor]
"""The tokens and the labels of a document."""
_OF_STATE: Final = ("state_dict", "load_state_dict")
_OF_SHARDS: Final = ("num_shards", "shard")


class PackedStream(IterableDataset[dict[str, Tensor]]):
    """The packs of a stream of documents, which are taken and packed in groups of `buffer`, as they come.

    What the stream offers, its packs offer, too: a state, shards, ``set_epoch``. A state is that of the stream at the
    beginning of a group, whose documents are read again.

    Args:
        documents: the stream.
        seq_len: the tokens of a pack.
        method: how a group is packed.
        buffer: the documents of a group.
        read: returns the tokens and labels of a document.
        build: makes a pack of parts of documents.
    """

    def __init__(
        self,
        documents: Any,
        seq_len: int,
        method: Method,
        buffer: int,
        *,
        read: Callable[[object], Document],
        build: Callable[[list[tuple[Tensor, Tensor]]], dict[str, Tensor]],
    ) -> None:
        self.documents, self.seq_len = documents, seq_len
        self._method: Method = method
        self._buffer, self._read, self._build = buffer, read, build
        self._group: object = None
        """The state of the stream when the current group began."""
        self._num_packs = self._num_skipped = 0

    def __getattr__(self, name: str) -> Any:
        """Return what the stream of documents offers beside its samples."""
        if name == "documents" or name.startswith("__"):
            raise AttributeError(name)
        documents = self.documents
        if name in _OF_STATE and saves_state(documents):
            return getattr(self, f"_{name}")
        if name in _OF_SHARDS and all(hasattr(documents, each) for each in _OF_SHARDS):
            return documents.num_shards if name == "num_shards" else self._shard
        if name == "set_epoch" and hasattr(documents, name):
            return documents.set_epoch
        raise AttributeError(f"{type(self).__name__} of {type(documents).__name__} has no attribute {name!r}")

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        documents, skipped = self.documents, self._num_skipped
        stream, number = iter(documents), 0
        self._num_skipped = 0
        while True:
            self._group, self._num_packs = documents.state_dict() if saves_state(documents) else None, 0
            group = [self._checked(document, number + place) for place, document in self._next(stream)]
            if not group:
                return
            number += len(group)
            lengths = [len(tokens) for tokens, _ in group]
            for pack in PACKERS[self._method](lengths, range(len(group)), self.seq_len, self._buffer):
                self._num_packs += 1
                if self._num_packs > skipped:
                    yield self._pack(group, pack)
            skipped = 0

    def _next(self, stream: Iterator[object]) -> Iterator[tuple[int, object]]:
        return enumerate(islice(stream, self._buffer))

    def _checked(self, document: object, number: int) -> Document:
        tokens, labels = self._read(document)
        if not len(tokens) or len(labels) != len(tokens):
            raise DataError(
                f"Documents must have at least one token, and as many labels, got {len(tokens)} and {len(labels)} for "
                f"document {number} of the stream; leave it out, or mend it."
            )
        return tokens, labels

    def _pack(self, group: list[Document], spans: list[Span]) -> dict[str, Tensor]:
        parts = [(group[document], slice(start, stop)) for document, start, stop in spans]
        return self._build([(tokens[part], labels[part]) for (tokens, labels), part in parts])

    def _shard(self, num_shards: int, index: int) -> PackedStream:
        part = self.documents.shard(num_shards=num_shards, index=index)
        return PackedStream(part, self.seq_len, self._method, self._buffer, read=self._read, build=self._build)

    def _state_dict(self) -> dict[str, object]:
        group = self.documents.state_dict() if self._group is None else self._group
        return {"documents": group, "packs": self._num_packs}

    def _load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.documents.load_state_dict(state_dict["documents"])
        self._num_skipped = int(state_dict["packs"])


def build_pack(parts: list[tuple[Tensor, Tensor]], seq_len: int, pad_id: int, ignored: int) -> dict[str, Tensor]:
    """Return a pack of parts of documents, each with its tokens and labels."""
    input_ids = torch.full((seq_len,), pad_id, dtype=torch.int64)
    all_labels = torch.full((seq_len + 1,), ignored, dtype=torch.int64)
    ends = [0]
    for tokens, labels in parts:
        part = slice(ends[-1], ends[-1] + tokens.shape[0])
        input_ids[part], all_labels[part] = tokens, labels
        ends.append(part.stop)
    begins, lengths = torch.tensor(ends), torch.tensor([*ends, seq_len]).diff()  # padding comes last
    all_labels[begins] = ignored
    numbers = torch.arange(len(ends))
    numbers[-1] = -1
    return {
        "input_ids": input_ids,
        "labels": all_labels[:-1],
        "position_ids": torch.arange(seq_len) - begins.repeat_interleave(lengths, output_size=seq_len),
        "document_ids": numbers.repeat_interleave(lengths, output_size=seq_len),
        "shift_labels": all_labels[1:].clone(),  # so that a change of one is none of the other
    }
