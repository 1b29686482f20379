"""Cut attention: an nn.MultiheadAttention of which this rank holds some heads."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..context_parallel.attention import AttentionMode, added_mask
from ..torch_internals.operators import list_function_modes
from .exchanges import TensorGroup
from .layers import CutLayer, Forward, Inputs, Named, Slices, local_part

_SIGNATURE: Final = inspect.signature(nn.MultiheadAttention.forward)


@dataclass(frozen=True)
class AttentionCut(CutLayer):
    """An nn.MultiheadAttention whose heads are distributed over the ranks.

    torch's forward derives the width of a head from the width of its input, and so cannot compute only some heads.
    """

    has_cut_memory: bool = True
    """Whether keys and values are shards of the sequence if the query is."""

    @classmethod
    def of(cls, module: nn.MultiheadAttention) -> AttentionCut:
        """Return the cut of an attention's parameters."""
        slices = {
            "in_proj_weight": Slices(0, 3),
            "in_proj_bias": Slices(0, 3),
            "q_proj_weight": Slices(0),
            "k_proj_weight": Slices(0),
            "v_proj_weight": Slices(0),
            "bias_k": Slices(2),
            "bias_v": Slices(2),
            "out_proj.weight": Slices(1),
        }
        names = {name for name, _ in module.named_parameters()}
        return cls({name: cut for name, cut in slices.items() if name in names})

    def with_whole_activations(self) -> CutLayer:
        """Return the same: it takes and returns whole activations."""
        return self

    def run(self, module: nn.Module, forward: Forward, group: TensorGroup, inputs: Inputs, named: Named) -> object:
        """Return the output, and the attention weights if requested."""
        assert isinstance(module, nn.MultiheadAttention)
        call = _SIGNATURE.bind(module, *inputs, **named)
        call.apply_defaults()
        arguments = dict(call.arguments)
        del arguments["self"]
        is_cut_along_sequence = any(isinstance(mode, AttentionMode) for mode in list_function_modes())
        attend = self._attend_over_ranks if is_cut_along_sequence else self._attend
        return attend(module, group, **arguments)

    def _attend(
        self,
        module: nn.MultiheadAttention,
        group: TensorGroup,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        average_attn_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value = self._whole_inputs(group, query, key, value)
        is_batched = query.dim() == 3
        q, k, v = (_batch_first(module, t) for t in _project_inputs(module, query, key, value))
        mask = _Masks(module, group, len(q), k.shape[1]).joined(attn_mask, key_padding_mask, q.dtype)
        q, k, v, mask = _with_extra_keys(module, q, k, v, mask)
        heads = module.num_heads // group.size
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
        dropout = module.dropout if module.training else 0.0
        weights = None
        if need_weights:
            scores = (q / sqrt(q.shape[-1])) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            output = weights @ v
        else:
            causal = is_causal and mask is not None and key_padding_mask is None and module.bias_k is None
            causal = causal and not module.add_zero_attn
            output = F.scaled_dot_product_attention(q, k, v, None if causal else mask, dropout, is_causal=causal)
        output = self._projected_output(module, group, output.transpose(1, 2).flatten(2), is_batched)
        if weights is not None:
            mean = weights.sum(1) / module.num_heads
            weights = group.sum(mean) if average_attn_weights else group.join(weights, 1)
            weights = weights if is_batched else weights.squeeze(0)
        return output, weights

    def _attend_over_ranks(
        self,
        module: nn.MultiheadAttention,
        group: TensorGroup,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend like `_attend`, but with the function that context parallelism puts in place of torch's."""
        attend: Any = F.multi_head_attention_forward
        is_batched, mask = query.dim() == 3, options.pop("attn_mask")
        inputs = self._whole_inputs(group, query, key, value)
        swaps = module.batch_first and is_batched
        separate = {f"{name}_proj_weight": _local_or_none(getattr(module, f"{name}_proj_weight")) for name in "qkv"}
        output, weights = attend(
            *(tensor.transpose(0, 1) if swaps else tensor for tensor in inputs),
            embed_dim_to_check=module.embed_dim,
            num_heads=module.num_heads // group.size,
            in_proj_weight=_local_or_none(module.in_proj_weight),
            in_proj_bias=_local_or_none(module.in_proj_bias),
            bias_k=module.bias_k,
            bias_v=module.bias_v,
            add_zero_attn=module.add_zero_attn,
            dropout_p=module.dropout,
            out_proj_weight=local_part(module.out_proj.weight),
            out_proj_bias=None,
            training=module.training,
            attn_mask=mask if mask is None or mask.dim() == 2 else _own_heads(mask, module, group).flatten(0, 1),
            use_separate_proj_weight=module.in_proj_weight is None,
            **separate,
            **options,
        )
        output = self._summed(module, group, output.transpose(0, 1) if swaps else output)
        if weights is not None:
            is_mean = options["average_attn_weights"]
            weights = group.sum(weights / group.size) if is_mean else group.join(weights, 1 if is_batched else 0)
        return output, weights

    def _whole_inputs(
        self, group: TensorGroup, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the whole inputs; inputs that are the same tensor are exchanged once."""
        dim = self.shard_dim

        def whole(tensor: Tensor, *, is_cut: bool) -> Tensor:
            return group.copy(tensor) if dim is None or not is_cut else group.join_copy(tensor, dim)

        q = whole(query, is_cut=True)
        k = q if key is query else whole(key, is_cut=self.has_cut_memory)
        v = q if value is query else k if value is key else whole(value, is_cut=self.has_cut_memory)
        return q, k, v

    def _projected_output(
        self, module: nn.MultiheadAttention, group: TensorGroup, output: Tensor, is_batched: bool
    ) -> Tensor:
        summand = F.linear(output, local_part(module.out_proj.weight))
        if not is_batched:
            summand = summand.squeeze(0)
        elif not module.batch_first:
            summand = summand.transpose(0, 1)
        return self._summed(module, group, summand)

    def _summed(self, module: nn.MultiheadAttention, group: TensorGroup, summand: Tensor) -> Tensor:
        bias = module.out_proj.bias
        if self.shard_dim is None:
            total = group.sum(summand)
            return total if bias is None else total + local_part(bias).to(total.dtype)
        total = group.sum_split(summand, self.shard_dim)
        return total if bias is None else total + group.copy(local_part(bias)).to(total.dtype)


def _project_inputs(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Return the queries, keys and values of this rank's heads."""
    bias = None if module.in_proj_bias is None else local_part(module.in_proj_bias)
    if module.in_proj_weight is not None:
        packed = local_part(module.in_proj_weight)
        if query is key and key is value:
            return F.linear(query, packed, bias).chunk(3, -1)
        weights = packed.chunk(3)
    else:
        weights = tuple(local_part(getattr(module, f"{name}_proj_weight")) for name in "qkv")
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(F.linear(t, w, b) for t, w, b in zip((query, key, value), weights, biases, strict=True))


def _batch_first(module: nn.MultiheadAttention, tensor: Tensor) -> Tensor:
    """Return a tensor of shape (batch, length, width)."""
    if tensor.dim() == 2:
        return tensor.unsqueeze(0)
    return tensor if module.batch_first else tensor.transpose(0, 1)


def _with_extra_keys(
    module: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Append the learned key and value, and the zero ones, that every query may attend to."""
    if module.bias_k is not None and module.bias_v is not None:
        k = torch.cat([k, local_part(module.bias_k).expand(len(k), 1, -1)], 1)
        v = torch.cat([v, local_part(module.bias_v).expand(len(v), 1, -1)], 1)
        mask = None if mask is None else F.pad(mask, (0, 1))
    if module.add_zero_attn:
        k, v = (torch.cat([t, t.new_zeros(len(t), 1, t.shape[-1])], 1) for t in (k, v))
        mask = None if mask is None else F.pad(mask, (0, 1))
    return q, k, v, mask


@dataclass(frozen=True)
class _Masks:
    """The masks of an attention, joined into one that is added to the scores of this rank's heads."""

    module: nn.MultiheadAttention
    group: TensorGroup
    batch_size: int
    num_keys: int

    def joined(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Return the sum of the masks, which broadcasts to (batch, heads, queries, keys)."""
        mask = None if attn_mask is None else added_mask(attn_mask, dtype)
        if mask is not None:
            mask = mask[None, None] if mask.dim() == 2 else _own_heads(mask, self.module, self.group)
        if key_padding_mask is None:
            return mask
        padding = added_mask(key_padding_mask, dtype).view(self.batch_size, 1, 1, self.num_keys)
        return padding if mask is None else mask + padding


def _own_heads(mask: Tensor, module: nn.MultiheadAttention, group: TensorGroup) -> Tensor:
    """Return this rank's part of the masks of all samples and heads, by sample and head."""
    by_head: Tensor = mask.unflatten(0, (-1, module.num_heads))
    return by_head.chunk(group.size, 1)[group.rank]


def _local_or_none(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else local_part(parameter)
