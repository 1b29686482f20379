"""AttentionMode: torch's attention functions over sequences that are cut over ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ...common.errors import ModuleError
from .document_masks import MaskKind, block_mask_of_rows, document_mask, mask_of_rows
from .exchange import Exchange, gathered_again
from .flex import FlexParts
from .near import tokens_in_window, tokens_of_documents
from .overridable import AS_IT_WAS
from .varlen import VarlenParts

ExchangeKind = Literal["allgather", "ulysses"]
EXCHANGES: Final = ("allgather", "ulysses")

_MOST_LENGTHS: Final = 4
"""The lengths of batches whose causal masks are kept."""
_MULTI_HEAD: Final = inspect.signature(F.multi_head_attention_forward)


class AttentionMode(TorchFunctionMode):
    """Makes torch's attention attend to the keys of all ranks.

    That is ``F.scaled_dot_product_attention``, ``nn.MultiheadAttention``, ``flex_attention`` (see `FlexParts`) and
    ``varlen_attn`` (see `VarlenParts`).

    Their arguments and results are for this rank's part of the sequence. ``is_causal`` refers to positions in the
    whole sequence. A mask has one row per query of this rank and one column per key of the whole sequence; a mask with
    a single row, as for padding, may also have only this rank's columns.

    With ``"allgather"``, each rank gathers keys and values. With ``"ulysses"``, ranks exchange parts of the sequence
    for heads, whose number must be a multiple of theirs. Sources: the Llama 3 report, 2024; Jacobs et al., "DeepSpeed
    Ulysses", 2023.

    Args:
        exchange: gathers over the ranks of the sequences.
        kind: ``"allgather"`` or ``"ulysses"``.
    """

    def __init__(self, exchange: Exchange, kind: ExchangeKind) -> None:
        super().__init__()
        self._exchange, self._kind = exchange, kind
        self._flex, self._varlen = FlexParts(exchange), VarlenParts(exchange, by_heads=kind == "ulysses")
        self._reached: Any = WeakIdKeyDictionary()
        """The tokens that masks reach, where these are not nearly all."""
        self._causal_masks: dict[tuple[object, ...], Tensor] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            call = _MULTI_HEAD.bind(*args, **kwargs)
            call.apply_defaults()
            return self._multi_head_attention(SimpleNamespace(**call.arguments))
        if func is document_mask:
            return self.mask_of_part(*args, **kwargs)
        name = getattr(func, "__name__", "") if hasattr(func, AS_IT_WAS) else ""
        if name == "flex_attention":
            return self._flex.attend(func, *args, **kwargs)
        if name == "varlen_attn":
            call = inspect.signature(func).bind(*args, **kwargs)
            query, key, value, *limits = call.args
            return self._varlen.attend(func, (query, key, value), limits[:2], limits[2:], **call.kwargs)
        if name == "varlen_attn_out":
            raise ModuleError(
                "torch.nn.attention.varlen.varlen_attn_out writes into a tensor without gradients, and knows only this "
                "rank's keys under context parallelism; call varlen_attn, or use cp=1."
            )
        return func(*args, **kwargs)

    # --- scaled_dot_product_attention --------------------------------------------------------------------------------

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Return the attention of this rank's queries over the keys of all ranks. Collective, and so is its backward.

        Shapes as in torch: (..., heads, length, width).

        Raises:
            ModuleError: for keys that are not part of the batch's sequences, and for masks of other shapes.
        """
        self._check_length(key, query if is_causal else None)
        near = None
        if attn_mask is not None:
            near = self._reached.get(attn_mask)
            attn_mask = self._whole_columns(attn_mask, key.shape[-2])
        options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        if self._kind == "ulysses":
            return self._attend_by_heads(query, key, value, attn_mask, is_causal, options)
        gathers = torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)
        gather = partial(self._exchange.gather, dim=-2)
        if near is not None and attn_mask is not None:
            gather = partial(self._exchange.gather_near, dim=-2, near=near)
            attn_mask = attn_mask.index_select(-1, near.columns(attn_mask.device))
        keys, values = gather(key), gather(value)
        pairs = [(key, keys), (value, values)]
        with gathered_again(gather, pairs) if gathers else nullcontext():
            if is_causal:
                return self._attend_causally(query, keys, values, options)
            return F.scaled_dot_product_attention(query, keys, values, attn_mask, **options)

    def _attend_causally(self, query: Tensor, keys: Tensor, values: Tensor, options: Mapping[str, Any]) -> Tensor:
        outputs, place = [], 0
        for start, end in self._exchange.cut.chunks(keys.shape[-2]):
            if start == end:
                continue
            own = query.narrow(-2, place, end - start)
            seen, mask = (keys.narrow(-2, 0, end), values.narrow(-2, 0, end)), self._causal_mask(own, end)
            outputs.append(F.scaled_dot_product_attention(own, *seen, mask, **options))
            place += end - start
        return torch.cat(outputs, -2)

    def _causal_mask(self, query: Tensor, end: int) -> Any:
        """Return the mask of queries whose last one is at ``end - 1``; layers share it, so backward keeps it once."""
        width = query.shape[-2]
        if query.device.type != "cpu":
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(width, end)  # has fused kernels
        key = width, end, query.dtype
        if key not in self._causal_masks:
            if len(self._causal_masks) >= _MOST_LENGTHS * self._exchange.cut.num_chunks:
                self._causal_masks.clear()
            is_later = torch.ones(width, end, dtype=torch.bool).triu(end - width + 1)
            self._causal_masks[key] = torch.zeros(width, end, dtype=query.dtype).masked_fill_(is_later, -math.inf)
        return self._causal_masks[key]

    def _attend_by_heads(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        options: Mapping[str, Any],
    ) -> Tensor:
        size, rank = self._exchange.cut.size, self._exchange.cut.rank
        heads, of_keys = (each.shape[-3] if each.ndim > 2 else 1 for each in (query, key))
        self._exchange.check_heads(heads, of_keys)
        if mask is not None:
            mask = self._exchange.gather(mask, -2) if mask.shape[-2] != 1 else mask
            if mask.ndim > 2 and mask.shape[-3] == heads:
                mask = mask.narrow(-3, rank * (heads // size), heads // size)
        queries, keys, values = (self._exchange.to_heads(tensor) for tensor in (query, key, value))
        output = F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=is_causal, **options)
        return self._exchange.to_sequence(output)

    # --- what may be attended to -------------------------------------------------------------------------------------

    def _check_length(self, key: Tensor, query: Tensor | None) -> None:
        length = key.shape[-2]
        if not self._exchange.lengths.known(length):
            raise ModuleError(self._exchange.lengths.refusal(f"{length} keys"))
        if query is not None and query.shape[-2] != length:
            raise ModuleError(
                f"Causal attention under context parallelism must have as many queries as keys, got "
                f"{query.shape[-2]} and {length}; use cp=1."
            )

    def _whole_columns(self, mask: Tensor, length: int) -> Tensor:
        rows, columns = mask.shape[-2:]
        if columns == 1:
            return mask
        if rows == 1 and columns == length:
            return self._exchange.gather(mask.contiguous(), -1)
        whole = self._exchange.lengths.whole(length)
        if columns == whole:
            return mask
        raise ModuleError(
            f"An attention mask under context parallelism must have a column for each of the {whole} keys of the whole "
            f"sequence, got shape {tuple(mask.shape)}; pass is_causal=True for a causal one, or pass the mask in the "
            "batch, cut along its rows (the hook sequence_dims)."
        )

    def mask_of_part(self, document_ids: Tensor, *, kind: MaskKind = "mask", **limits: Any) -> object:
        """Return this rank's rows of a `document_mask` over whole sequences, given this rank's ids. Collective."""
        whole = self._exchange.gather(document_ids, 1)
        rows = self._exchange.cut.positions(whole.shape[1], whole.device)
        if kind == "flex":
            return self.block_mask(whole, rows, **limits)
        mask = mask_of_rows(whole, rows, **limits)
        self.note_reach(mask, whole, limits["window"], is_causal=limits["is_causal"])
        return mask

    def block_mask(self, document_ids: Tensor, rows: Tensor, **limits: Any) -> object:
        """Return the rows of a block mask over whole sequences, with columns for the tokens that it reaches."""
        near = tokens_of_documents(self._exchange.cut, document_ids, limits["window"], is_causal=limits["is_causal"])
        if near is None:
            return block_mask_of_rows(document_ids, rows, **limits)
        mask = block_mask_of_rows(document_ids, rows, near.columns(rows.device), **limits)
        self._flex.note_reach(mask, near)
        return mask

    def note_reach(self, mask: Tensor, document_ids: Tensor | None, window: int | None, *, is_causal: bool) -> None:
        """Note what a mask of this rank's rows allows at most, so that no other tokens are sent.

        Args:
            mask: the mask.
            document_ids: of the whole sequences; None if each is one document.
            window: tokens are fewer than this away.
            is_causal: only earlier ones.
        """
        cut, near = self._exchange.cut, None
        if self._kind == "ulysses":
            return
        if document_ids is not None:
            near = tokens_of_documents(cut, document_ids, window, is_causal=is_causal)
        elif window is not None:
            near = tokens_in_window(cut, mask.shape[-1], window, is_causal=is_causal)
        if near is not None and near.saves:
            self._reached[mask] = near

    # --- nn.MultiheadAttention ---------------------------------------------------------------------------------------

    def _multi_head_attention(self, call: Any) -> tuple[Tensor, Tensor | None]:
        """Do what torch's function does with these arguments, using `attend`."""
        if call.bias_k is not None or call.add_zero_attn or call.static_k is not None or call.static_v is not None:
            raise ModuleError(
                "nn.MultiheadAttention under context parallelism must have add_bias_kv=False and add_zero_attn=False, "
                f"got add_bias_kv={call.bias_k is not None}, add_zero_attn={call.add_zero_attn}; set both to False, or "
                "use cp=1."
            )
        is_batched, padding = call.query.ndim == 3, call.key_padding_mask
        inputs = [x if is_batched else x.unsqueeze(1) for x in (call.query, call.key, call.value)]
        if padding is not None and not is_batched:
            padding = padding.unsqueeze(0)
        weights = call.q_proj_weight, call.k_proj_weight, call.v_proj_weight
        if not call.use_separate_proj_weight:
            weights = call.in_proj_weight.chunk(3)
        biases = (None, None, None) if call.in_proj_bias is None else call.in_proj_bias.chunk(3)
        # from (length, batch, width) to (batch, heads, length, width of a head)
        q, k, v = (
            _split_heads(F.linear(x, weight, bias), call.num_heads)
            for x, weight, bias in zip(inputs, weights, biases, strict=True)
        )
        mask = self._merged_mask(q, k, None if call.is_causal else call.attn_mask, padding, is_causal=call.is_causal)
        dropout_p = call.dropout_p if call.training else 0.0
        is_plainly_causal = call.is_causal and mask is None
        attention: Tensor | None = None
        if call.need_weights:
            output, attention = self._attend_with_weights(q, k, v, mask, dropout_p, is_causal=is_plainly_causal)
            attention = attention.mean(1) if call.average_attn_weights else attention
            attention = attention if is_batched else attention.squeeze(0)
        else:
            output = self.attend(q, k, v, mask, dropout_p, is_plainly_causal)
        output = F.linear(output.permute(2, 0, 1, 3).flatten(2), call.out_proj_weight, call.out_proj_bias)
        return output if is_batched else output.squeeze(1), attention

    def _merged_mask(
        self, q: Tensor, k: Tensor, mask: Tensor | None, padding: Tensor | None, *, is_causal: bool
    ) -> Tensor | None:
        """Return the masks as one to add, with the shape (batch or 1, heads or 1, this rank's rows, all columns)."""
        merged: Tensor | None = None
        if mask is not None:
            mask = mask.view(q.shape[0], q.shape[1], *mask.shape[1:]) if mask.ndim == 3 else mask[None, None]
            merged = self._whole_columns(added_mask(mask, q.dtype), k.shape[-2])
        if padding is not None:
            columns = self._whole_columns(added_mask(padding, q.dtype)[:, None, None], k.shape[-2])
            if is_causal:
                merged = self._whole_causal_mask(q, k)
            merged = columns if merged is None else merged + columns
        return merged

    def _whole_causal_mask(self, q: Tensor, k: Tensor) -> Tensor:
        length = self._exchange.lengths.whole(k.shape[-2])
        rows = self._exchange.cut.positions(length, q.device)
        is_later = torch.arange(length, device=q.device) > rows[:, None]
        return torch.zeros(is_later.shape, dtype=q.dtype, device=q.device).masked_fill_(is_later, -math.inf)[None, None]

    def _attend_with_weights(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, *, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Attend, and also return the weights: one row per query of this rank, one column per key of all ranks."""
        self._check_length(k, q if is_causal else None)
        mask = self._whole_causal_mask(q, k) if is_causal else mask
        keys, values = self._exchange.gather(k, -2), self._exchange.gather(v, -2)
        scores = q @ keys.transpose(-2, -1) / math.sqrt(q.shape[-1])
        weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout_p)
        return weights @ values, weights


def _split_heads(projected: Tensor, num_heads: int) -> Tensor:
    length, batch, width = projected.shape
    return projected.view(length, batch, num_heads, width // num_heads).permute(1, 2, 0, 3)


def added_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to scores; True in a boolean mask of `nn.MultiheadAttention` means masked out."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(mask, -math.inf)
