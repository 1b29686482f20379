"""Positions for models of transformers, which count the tokens of a part of a sequence from 0 where none are given."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...common.foreign import attribute_of
from .context import ContextParallel
from .document_masks import documents_of, mask_of_rows

_Limits = tuple[int | None, int | None]
"""The window and the chunk of a kind of attention."""


class GivesPositions:
    """A hook before a model's forward that adds the positions of this rank's part, and the mask of its tokens.

    From a part, such a model can tell neither where it lies nor where documents begin that share a sequence, and its
    windows would end where the part does. So it gets a whole mask if it has windows, documents (positions that start
    anew) or padding, and one that masks nothing otherwise. Attention then has a column for each token of the whole.

    Args:
        context: knows whether a part runs, and which.
        model: the model.
    """

    def __init__(self, context: ContextParallel, model: nn.Module) -> None:
        self._context: ContextParallel | None = context
        self._signature = inspect.signature(model.forward)
        self._kinds = _kinds_of_attention(model)
        self._is_flex = attribute_of(attribute_of(model, "config"), "_attn_implementation") == "flex_attention"

    def __deepcopy__(self, memo: dict[int, object]) -> GivesPositions:
        return self  # a copy of the module trains in the same processes

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_context": None}  # where the module is unpickled, there are no parts

    def __call__(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        context = self._context
        if context is None or not context.is_cut:
            return None
        given = self._signature.bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        inputs = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if not isinstance(inputs, Tensor) or inputs.ndim < 2:
            return None
        own, length = context.positions(inputs.shape[1], inputs.device)[None], context.whole_length(inputs.shape[1])
        positions, mask = given.get("position_ids"), given.get("attention_mask")
        added = {} if positions is not None else {"position_ids": own}
        if "attention_mask" in self._signature.parameters and (mask is None or _is_padding(mask)):
            padding = None if mask is None else context.whole(mask.bool(), 1)
            make = self._block_masks if self._is_flex else self._masks
            made = make(inputs, own[0], positions, padding, length)
            if made is not None:
                args, kwargs = self._without_mask(args, kwargs)
                added["attention_mask"] = made
        return args, {**kwargs, **added}

    def _masks(
        self, inputs: Tensor, rows: Tensor, positions: Tensor | None, padding: Tensor | None, length: int
    ) -> Any:
        """Return this part's rows of the masks of a model; None where what the model is given says all."""
        context = self._context
        assert context is not None
        documents = None if positions is None or positions.ndim != 2 else _document_ids(context, positions)
        masks = _whole_mask(self._kinds, rows, documents, padding, length)
        if masks is None:
            is_plain = padding is None and documents is None
            return torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device) if is_plain else None
        for kind, mask in masks.items():
            context.note_reach(mask, documents, self._kinds[kind][0])
        return masks.get("", masks)

    def _block_masks(
        self, inputs: Tensor, rows: Tensor, positions: Tensor | None, padding: Tensor | None, length: int
    ) -> Any:
        """Return this part's rows of the block masks of a model, one or by kind of layer; None if they are unknown."""
        assert self._context is not None
        if not self._kinds:
            return None
        ids = torch.zeros(1, length, dtype=torch.long, device=inputs.device)
        if positions is not None and positions.ndim == 2:
            ids = documents_of(self._context.whole(positions.contiguous(), 1))
        if padding is not None:
            ids = ids.expand(len(padding), length)
        limits: dict[str, object] = {"is_causal": True, "is_token": padding}
        masks = {
            kind: self._context.block_mask(ids, rows, window=window, chunk=chunk, **limits)
            for kind, (window, chunk) in self._kinds.items()
        }
        return masks.get("", masks)

    def _without_mask(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Any, dict[str, object]]:
        """Return arguments among whose positional ones there is no mask."""
        place = [*self._signature.parameters].index("attention_mask")
        if len(args) <= place:
            return args, kwargs
        named = zip([*self._signature.parameters][place + 1 :], args[place + 1 :], strict=False)
        return args[:place], {**kwargs, **dict(named)}


def give_positions(module: nn.Module, context: ContextParallel) -> list[RemovableHandle]:
    """Let every model of transformers in a module that takes positions get those of its part of a sequence."""
    handles = []
    for part in module.modules():
        is_model = any(
            (kind.__module__, kind.__name__) == ("transformers.modeling_utils", "PreTrainedModel")
            for kind in type(part).__mro__
        )
        if is_model and "position_ids" in inspect.signature(part.forward).parameters:
            handles.append(part.register_forward_pre_hook(GivesPositions(context, part), with_kwargs=True))
    return handles


def _is_padding(mask: object) -> bool:
    return isinstance(mask, Tensor) and mask.ndim == 2


def _document_ids(context: ContextParallel, positions: Tensor) -> Tensor | None:
    """Return the document ids of whole sequences, given the positions of a part; None if each is one document."""
    documents = documents_of(context.whole(positions.contiguous(), 1))
    return documents if bool((documents != documents[:, :1]).any()) else None


def _whole_mask(
    kinds: Mapping[str, _Limits], rows: Tensor, documents: Tensor | None, padding: Tensor | None, length: int
) -> dict[str, Tensor] | None:
    """Return this part's rows of the masks of a model by kind of layer; None if it needs none, or if they are unknown.

    Args:
        kinds: the model's kinds of attention.
        rows: the places of this part's tokens.
        documents: document ids of the whole sequences; None if each is one document.
        padding: True for the tokens that are no padding; None without padding.
        length: of the whole sequences.
    """
    is_padded = padding is not None and not bool(padding.all())
    is_cut = any(limit is not None and limit < length for limits in kinds.values() for limit in limits)
    if not kinds or not (is_cut or is_padded or documents is not None):
        return None
    ids = torch.zeros(1, length, dtype=torch.long, device=rows.device) if documents is None else documents
    masks = {
        kind: mask_of_rows(ids, rows, is_causal=True, window=window, chunk=chunk)
        for kind, (window, chunk) in kinds.items()
    }
    if is_padded:
        assert padding is not None
        masks = {kind: mask & padding[:, None, None] for kind, mask in masks.items()}
    return masks


def _kinds_of_attention(model: nn.Module) -> dict[str, _Limits]:
    """Return the limits of each kind of layer, "" if there is one only; empty unless all are causal and known."""
    whole: Any = attribute_of(model, "config")
    causal = {attribute_of(part, "is_causal") for part in model.modules()} - {None}
    if attribute_of(whole, "_attn_implementation") not in ("sdpa", "flex_attention") or causal != {True}:
        return {}
    config = whole.get_text_config()
    window, chunk = attribute_of(config, "sliding_window"), attribute_of(config, "attention_chunk_size")
    known: dict[str, _Limits] = {
        "full_attention": (None, None),
        "sliding_attention": (window, None),
        "chunked_attention": (None, chunk),
    }
    if hasattr(config, "layer_types"):
        kinds = set(config.layer_types)
        return {kind: known[kind] for kind in kinds} if kinds <= known.keys() else {}
    return {"": (window, None) if window is not None else (None, chunk)}
