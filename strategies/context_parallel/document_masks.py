"""Masks for attention inside documents that share sequences, within a window, or in chunks."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from ...common.errors import ConfigError

MaskKind = Literal["mask", "flex"]


def document_mask(
    document_ids: Tensor,
    *,
    is_causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    kind: MaskKind = "mask",
) -> Any:
    """Return the mask for attention inside documents that share sequences, as `PackedDataset` makes them.

    For ``F.scaled_dot_product_attention(attn_mask=)``, or as a block mask for ``flex_attention(block_mask=)``, and for
    models of transformers with that attention (``attention_mask=``, without a cache). A token attends to those with its
    document id; padding to padding, so that no row is empty. Under context parallelism, inside a step, the ids are
    those of this rank's part of the sequences, and the mask has a column for each token of the whole. Then it is
    collective: all ranks of a sequence call it. For a mask that is passed on as it is, they exchange only the keys of
    the documents, or of the window, that it reaches; a block mask has columns for these alone.

    Args:
        document_ids: the number of the document that each token belongs to; shape (batch, tokens).
        is_causal: attend to the token itself and earlier ones only.
        window: attend to tokens that are fewer than this away (a sliding window).
        chunk: attend inside chunks of this many tokens, counted from the start of each document.
        kind: ``"mask"`` for a tensor, ``"flex"`` for a ``BlockMask`` of FlexAttention, which is small.

    Returns:
        True where attention is allowed; shape (batch, 1, tokens, tokens).

    Raises:
        ConfigError: for ids of another shape, for a window or chunk below 1, and for another kind.

    Example::

        query = key = value = torch.randn(1, 2, 5, 8)  # 2 heads, 5 tokens
        mask = document_mask(torch.tensor([[0, 0, 1, 1, 1]]))
        output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    """
    if document_ids.ndim != 2:
        raise ConfigError(
            f"document_ids must have the shape (batch, tokens), got {tuple(document_ids.shape)}; pass those of a batch "
            "that PackedDataset.collate has made."
        )
    for name, value in {"window": window, "chunk": chunk}.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {name}={value}; give a number of tokens, or None.")
    if kind not in ("mask", "flex"):
        raise ConfigError(f"kind must be 'mask' or 'flex', got {kind!r}; give one of them.")
    limits: dict[str, Any] = {"is_causal": is_causal, "window": window, "chunk": chunk}
    if has_torch_function_unary(document_ids):  # context parallelism knows the other parts of the sequences
        return handle_torch_function(document_mask, (document_ids,), document_ids, **limits, kind=kind)
    return (mask_of_rows if kind == "mask" else block_mask_of_rows)(document_ids, **limits)


def mask_of_rows(
    document_ids: Tensor, rows: Tensor | None = None, *, is_causal: bool, window: int | None, chunk: int | None
) -> Tensor:
    """Return the rows of a mask for the tokens at the places `rows` of whole sequences; by default all."""
    columns = torch.arange(document_ids.shape[1], device=document_ids.device)
    rows = columns if rows is None else rows
    mask = document_ids[:, rows, None] == document_ids[:, None, :]
    distance = rows[:, None] - columns
    if is_causal:
        mask &= distance >= 0
    if window is not None:
        mask &= distance.abs() < window
    if chunk is not None:
        chunks = _places_in_documents(document_ids, columns) // chunk
        mask &= chunks[:, rows, None] == chunks[:, None, :]
    return mask[:, None]


def block_mask_of_rows(
    document_ids: Tensor,
    rows: Tensor | None = None,
    keys: Tensor | None = None,
    *,
    is_causal: bool,
    window: int | None,
    chunk: int | None,
    is_token: Tensor | None = None,
) -> object:
    """Return the rows of a block mask for the tokens at the places `rows`; `is_token` is False for padding.

    It has a column for each token, or for each of those at the places `keys`.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    columns = torch.arange(document_ids.shape[1], device=document_ids.device)
    rows = columns if rows is None else rows
    chunks = None if chunk is None else _places_in_documents(document_ids, columns) // chunk

    is_shared = len(document_ids) == 1  # by all sequences of a batch, whose number is not known

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = rows[query]
        if keys is not None:
            key = keys[key]
        if is_shared:
            batch = batch * 0
        found = document_ids[batch, row] == document_ids[batch, key]
        if is_causal:
            found = found & (row >= key)
        if window is not None:
            found = found & ((row - key).abs() < window)
        if chunks is not None:
            found = found & (chunks[batch, row] == chunks[batch, key])
        return found if is_token is None else found & is_token[batch, key]

    sizes = document_ids.shape[0], None, len(rows), len(columns if keys is None else keys)
    return create_block_mask(allowed, *sizes, device=document_ids.device)


def documents_of(position_ids: Tensor) -> Tensor:
    """Return document ids for positions that start anew with each document, as transformers reads them."""
    begins = position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1
    return begins.cumsum(-1)


def _places_in_documents(document_ids: Tensor, columns: Tensor) -> Tensor:
    """Return the place of each token in its document."""
    begins = document_ids.diff(dim=-1, prepend=document_ids[:, :1] - 1) != 0
    return columns - torch.where(begins, columns, 0).cummax(-1).values
