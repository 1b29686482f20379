"""FlexParts: FlexAttention of this rank's queries over the keys of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...common.errors import ModuleError
from .exchange import Exchange
from .near import NearTokens
from .overridable import as_it_was

_Mod = Callable[..., Tensor]
_MOST_MASKS: Final = 8
_DEEPEST: Final = 8


class FlexParts:
    """Gives ``flex_attention`` all keys, and its functions the places of tokens in the whole sequence.

    A block mask may be one of the part (as the module sees it), of the whole sequence, or of this rank's rows over the
    whole, as `document_mask` makes it. Of the first two, this rank's rows are made again from its ``mask_mod``.

    Args:
        exchange: gathers over the ranks of the sequences.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._masks: dict[int, tuple[Any, Any]] = {}
        """Block masks by identity, with those made from them, which layers share."""
        self._reached: Any = WeakIdKeyDictionary()
        """Of block masks with columns for some tokens of the whole: which these are."""
        self._compiled: Callable[..., object] | None = None

    def attend(
        self,
        function: Callable[..., object],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: _Mod | None = None,
        block_mask: object = None,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Return what ``flex_attention`` returns for this rank's queries. Collective, and so is its backward.

        Raises:
            ModuleError: for queries and keys that are not part of the batch's sequences, for block masks of other
                lengths, and for functions that hold tensors of this rank's part.
        """
        lengths, part = self._exchange.lengths, key.shape[-2]
        if not lengths.known(part):
            raise ModuleError(lengths.refusal(f"{part} keys"))
        whole, own = lengths.whole(part), lengths.whole(query.shape[-2])
        rows = self._exchange.cut.positions(own, query.device)
        near = None if block_mask is None else self._reached.get(block_mask)
        if score_mod is not None:
            _refuse_captured(score_mod, "score_mod", {part, query.shape[-2]})
            score_mod = _at_places(score_mod, rows, None if near is None else near.columns(query.device))
        if near is not None:
            keys, values = (self._exchange.gather_near(each, -2, near) for each in (key, value))
            return self._plain(function, query)(query, keys, values, score_mod, block_mask, *args, **kwargs)
        if block_mask is not None:
            block_mask = self._rows_of(block_mask, (query.shape[-2], part), (own, whole), rows)
        keys, values = self._exchange.gather(key, -2), self._exchange.gather(value, -2)
        return self._plain(function, query)(query, keys, values, score_mod, block_mask, *args, **kwargs)

    def note_reach(self, mask: object, near: NearTokens) -> None:
        """Note which tokens of the whole a block mask has columns for."""
        self._reached[mask] = near

    def _plain(self, function: Callable[..., object], query: Tensor) -> Callable[..., Any]:
        """Return the function as torch has it: fused where there are such kernels for training."""
        if query.device.type == "cpu":
            return as_it_was(function)
        if self._compiled is None:
            self._compiled = torch.compile(as_it_was(function))
        return self._compiled

    def _rows_of(self, mask: Any, parts: tuple[int, int], wholes: tuple[int, int], rows: Tensor) -> object:
        """Return the block mask of this rank's queries over all keys."""
        found = tuple(mask.seq_lengths)
        if found == (parts[0], wholes[1]):
            return mask
        kept = self._masks.get(id(mask))
        if kept is not None and kept[0] is mask and tuple(kept[1].seq_lengths) == (parts[0], wholes[1]):
            return kept[1]
        if found not in (parts, wholes):
            raise ModuleError(
                f"A block mask under context parallelism must be for the {wholes[0]} x {wholes[1]} tokens of whole "
                f"sequences, or for this rank's part, {parts[0]} x {parts[1]}, got {found[0]} x {found[1]}; make it "
                "with create_block_mask from the batch's length, or with echelon.document_mask(ids, kind='flex')."
            )
        if found == parts:
            _refuse_captured(mask.mask_mod, "mask_mod", set(parts))
        from torch.nn.attention.flex_attention import create_block_mask

        batch, heads = mask.shape[:2]
        sizes = (batch, heads, parts[0], wholes[1])
        made = create_block_mask(
            _at_places(mask.mask_mod, rows), *sizes, device=rows.device, BLOCK_SIZE=mask.BLOCK_SIZE
        )
        if len(self._masks) >= _MOST_MASKS:
            self._masks.clear()
        self._masks[id(mask)] = mask, made
        return made


def _at_places(mod: _Mod, rows: Tensor, columns: Tensor | None = None) -> _Mod:
    """Return a function of a mask or a score that gets the places of queries, and keys, in the whole sequence."""

    def moved(*args: Any) -> Tensor:
        *before, query, key = args
        return mod(*before, rows[query], key if columns is None else columns[key])

    def moved_mask(batch: object, head: object, query: object, key: object) -> Tensor:
        return moved(batch, head, query, key)

    def moved_score(score: object, batch: object, head: object, query: object, key: object) -> Tensor:
        return moved(score, batch, head, query, key)

    return moved_score if _takes_scores(mod) else moved_mask


def _takes_scores(mod: _Mod) -> bool:
    import inspect

    parameters = inspect.signature(mod).parameters.values()
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters) == 5


def _refuse_captured(mod: _Mod, name: str, lengths: set[int]) -> None:
    """Refuse a function that holds a tensor of this rank's tokens, which places in the whole do not index.

    Raises:
        ModuleError: naming the shape.
    """
    for tensor in _captured_tensors(mod, _DEEPEST):
        if any(size in lengths for size in tensor.shape):
            raise ModuleError(
                f"{name} of flex_attention under context parallelism gets places in whole sequences, but it holds a "
                f"tensor of shape {tuple(tensor.shape)}, which has the length of this rank's part; for documents, pass "
                "block_mask=echelon.document_mask(ids, kind='flex'), or use cp=1."
            )


def _captured_tensors(value: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors that a function holds: in its closure, and in functions and containers there."""
    if isinstance(value, Tensor):
        yield value
    if not depth:
        return
    inner: tuple[object, ...] = ()
    if isinstance(value, FunctionType):
        cells = (cell for cell in value.__closure__ or () if cell is not None)
        inner = (*(_cell_content(cell) for cell in cells), *(value.__defaults__ or ()))
    elif isinstance(value, functools.partial):
        inner = (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, tuple | list):
        inner = tuple(value)
    elif callable(value) and hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module):
        inner = tuple(vars(value).values())
    for each in inner:
        yield from _captured_tensors(each, depth - 1)


def _cell_content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that has no value yet
        return None
