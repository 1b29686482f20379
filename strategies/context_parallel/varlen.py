"""VarlenParts: attention of varying length, of this rank's queries over the keys of all ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...common.errors import ConfigError, ModuleError
from ..torch_internals.tensors import read_version
from .exchange import Exchange, gathered_again
from .near import NearTokens, tokens_of_documents
from .overridable import as_it_was

_OF_INFERENCE: Final = ("seqused_k", "block_table")


@dataclass(frozen=True)
class _Pieces:
    """The pieces of documents that a rank has, and the keys of each, as ``varlen_attn`` takes them."""

    batch: int
    """The number of sequences that were joined."""
    of_queries: Tensor
    """Where the pieces begin among this rank's tokens, and where the last one ends."""
    of_keys: Tensor
    """The same among the keys."""
    keys: Tensor
    """Which of the gathered tokens each key is; a document that is in two chunks of a rank has two ranges of them."""
    most_queries: int
    most_keys: int
    near: NearTokens | None
    """The tokens that are gathered; None for all."""


class VarlenParts:
    """Gives ``varlen_attn`` the pieces of documents that this rank has, each with the keys of its document.

    A call gets the joined tokens of this rank's parts, and the ends of the documents in the whole, joined sequences of
    the batch (``cu_seqlens`` of `PackedDataset.collate`). A piece that begins inside of its document is the end of
    what its queries see of it: so ``varlen_attn`` aligns queries with keys.

    Args:
        exchange: over the ranks of the sequences.
        by_heads: whether heads are exchanged for the parts of the sequences.
    """

    def __init__(self, exchange: Exchange, *, by_heads: bool) -> None:
        self._exchange, self._by_heads = exchange, by_heads
        self._made: Any = WeakIdKeyDictionary()
        """By the tensor with the ends of documents: what layers share."""

    def attend(
        self,
        function: Callable[..., object],
        heads: Sequence[Tensor],
        ends: Sequence[Tensor | None],
        longest: Sequence[int],
        *,
        window_size: Sequence[int] = (-1, -1),
        **options: object,
    ) -> object:
        """Return what ``varlen_attn`` returns for this rank's queries. Collective, and so is its backward.

        Args:
            function: that of torch.
            heads: queries, keys and values.
            ends: of the documents, for queries and for keys.
            longest: the tokens of the longest document, for queries and for keys.
            window_size: see ``varlen_attn``, as other options.
            options: others.

        Raises:
            ModuleError: for queries, keys and documents that are not those of the batch's sequences, and for what is
                made for generating.
            ConfigError: for a window that looks ahead, and for heads that ``"ulysses"`` cannot exchange.
        """
        query, key, value = heads
        of_queries, of_keys = ends
        assert of_queries is not None
        self._check(query, key, of_queries, of_keys, options)
        window = self._window(window_size)
        options |= {"window_size": window}
        if self._by_heads:
            return self._attend_by_heads(function, heads, of_queries, longest, options)
        pieces = self._pieces(query, of_queries, window)
        gather = partial(self._keys, pieces)
        gathers = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
        keys, values = gather(key), gather(value)
        with gathered_again(gather, [(key, keys), (value, values)]) if gathers else nullcontext():
            limits = pieces.of_queries, pieces.of_keys, pieces.most_queries, pieces.most_keys
            return as_it_was(function)(query, keys, values, *limits, **options)

    def _attend_by_heads(
        self,
        function: Callable[..., object],
        parts: Sequence[Tensor],
        ends: Tensor,
        longest: Sequence[int],
        options: dict[str, Any],
    ) -> object:
        self._exchange.check_heads(parts[0].shape[1], parts[1].shape[1])
        aux = options.get("return_aux")
        if aux is not None and aux.lse:
            raise ConfigError(
                "varlen_attn with cp_exchange='ulysses' returns no log-sum-exp, got return_aux.lse=True; leave it out, "
                "or use cp_exchange='allgather'."
            )
        batch, _ = self._exchange.lengths.joined(len(parts[0]), int(ends[-1]))
        wholes = [
            self._exchange.to_heads(part.unflatten(0, (batch, -1)).transpose(1, 2)).transpose(1, 2).flatten(0, 1)
            for part in parts
        ]
        output = as_it_was(function)(*wholes, ends, ends, *longest, **options)
        own = self._exchange.to_sequence(output.unflatten(0, (batch, -1)).transpose(1, 2))
        return own.transpose(1, 2).flatten(0, 1)

    def _check(self, query: Tensor, key: Tensor, ends: Tensor, of_keys: Tensor | None, options: dict[str, Any]) -> None:
        for name in _OF_INFERENCE:
            if options.get(name) is not None:
                raise ModuleError(
                    f"varlen_attn under context parallelism trains and evaluates, got {name} of shape "
                    f"{tuple(options[name].shape)}, which is for generating; leave it out, or use cp=1."
                )
        is_same = of_keys is ends or (of_keys is not None and of_keys.shape == ends.shape and of_keys.equal(ends))
        if len(query) != len(key) or not is_same:
            raise ModuleError(
                f"varlen_attn under context parallelism must have as many queries as keys in each document, got "
                f"{len(query)} queries and {len(key)} keys{'' if is_same else ' and two different cu_seq'}; pass one "
                "cu_seqlens for both, or use cp=1."
            )

    def _window(self, given: Sequence[int]) -> tuple[int, int]:
        left, right = given
        if right > 0 or (right < 0 <= left):
            raise ConfigError(
                f"window_size of varlen_attn under context parallelism must be (-1, -1), (-1, 0) or (tokens, 0), got "
                f"{tuple(given)}; use attn_mask=echelon.document_mask(ids, is_causal=False, window=...), or cp=1."
            )
        return left, right

    def _pieces(self, query: Tensor, ends: Tensor, window: tuple[int, int]) -> _Pieces:
        """Return this rank's pieces; made once for all layers that are given the same tensor."""
        kept = self._made.setdefault(ends, {})
        key = (read_version(ends), len(query), window)
        if key not in kept:
            kept[key] = self._cut(query, ends, window)
        made: _Pieces = kept[key]
        return made

    def _cut(self, query: Tensor, ends: Tensor, window: tuple[int, int]) -> _Pieces:
        places = ends.tolist()  # the one wait for a device
        batch, length = self._exchange.lengths.joined(len(query), places[-1])
        begins_anew = set(range(0, batch * length, length)) <= set(places)
        near = self._near(places, (batch, length), window) if begins_anew else None
        found = list(self._pieces_of(places, (batch, length), window))
        device = query.device
        keys = torch.cat([torch.arange(start, stop) for _, start, stop in found])
        if near is not None:
            columns = near.columns(torch.device("cpu"))
            keys = keys // length * len(columns) + torch.searchsorted(columns, keys % length)
        queries = torch.tensor([0, *(number for number, _, _ in found)]).cumsum(0)
        of_keys = torch.tensor([0, *(stop - start for _, start, stop in found)]).cumsum(0)
        return _Pieces(
            batch=batch,
            of_queries=queries.to(device, ends.dtype),
            of_keys=of_keys.to(device, ends.dtype),
            keys=keys.to(device),
            most_queries=int(queries.diff().max()),
            most_keys=int(of_keys.diff().max()),
            near=near,
        )

    def _pieces_of(
        self, ends: Sequence[int], sizes: tuple[int, int], window: tuple[int, int]
    ) -> Iterator[tuple[int, int, int]]:
        """Yield, for each piece of a document in this rank's chunks, its length, and where its keys begin and end."""
        (batch, length), (left, right) = sizes, window
        for row in range(batch):
            for first, last in self._exchange.cut.chunks(length):
                for start, stop in _overlapping_documents(ends, row * length + first, row * length + last):
                    begin, end = max(start, row * length + first), min(stop, row * length + last)
                    seen = max(start, begin - left) if left >= 0 else start
                    yield end - begin, seen, stop if right < 0 else end

    def _near(self, ends: Sequence[int], sizes: tuple[int, int], window: tuple[int, int]) -> NearTokens | None:
        ids = torch.repeat_interleave(torch.arange(len(ends) - 1), torch.tensor(ends).diff()).view(sizes)
        left, right = window
        return tokens_of_documents(self._exchange.cut, ids, left + 1 if left >= 0 else None, is_causal=right == 0)

    def _keys(self, pieces: _Pieces, part: Tensor) -> Tensor:
        """Return the keys, or values, of all pieces after each other. Collective."""
        rows = part.unflatten(0, (pieces.batch, -1))
        if pieces.near is None:
            whole = self._exchange.gather(rows, 1)
        else:
            whole = self._exchange.gather_near(rows, 1, pieces.near)
        return whole.flatten(0, 1).index_select(0, pieces.keys)


def _overlapping_documents(ends: Sequence[int], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield where the documents begin and end that have a token in a range."""
    for place in range(bisect_right(ends, first) - 1, len(ends) - 1):
        start, stop = ends[place], ends[place + 1]
        if start >= last:
            return
        if start < stop and first < last:
            yield start, stop
