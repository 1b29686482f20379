"""Kernels of torch's ``varlen_attn`` for the CPU, where torch has none: attention inside of each document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen


def _documents(
    query: Tensor, key: Tensor, of_queries: Tensor, of_keys: Tensor, window: Any, scale: float | None
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the queries and the keys of each document, and the weights, with the shape (heads, queries, keys).

    The last query is at the place of the last key, as in Flash Attention.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    left, right = window
    group = query.shape[1] // key.shape[1]
    for number in range(len(of_queries) - 1):
        own = slice(*of_queries[number : number + 2].tolist())
        seen = slice(*of_keys[number : number + 2].tolist())
        keys = key[seen].repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", query[own], keys) * scale
        rows, columns = scores.shape[1:]
        ahead = torch.arange(columns) - torch.arange(rows)[:, None] - (columns - rows)
        is_hidden = torch.zeros(rows, columns, dtype=torch.bool)
        if right >= 0:
            is_hidden |= ahead > right
        if left >= 0:
            is_hidden |= -ahead > left
        yield own, seen, scores.masked_fill(is_hidden, -torch.inf)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Any = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the attention, its log-sum-exp and a state of random numbers, as torch's operator."""
    output, sums = torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    for own, seen, scores in _documents(query, key, cu_seq_q, cu_seq_k, window_size, scale):
        assert own.stop - own.start <= max_q
        assert seen.stop - seen.start <= max_k
        values = value[seen].repeat_interleave(query.shape[1] // value.shape[1], 1)
        output[own] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        sums[:, own] = scores.logsumexp(-1).float()
    return output, sums, torch.zeros(2, dtype=torch.uint64)


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys and values."""
    found = [torch.zeros_like(each) for each in (query, key, value)]
    scaled = query.shape[-1] ** -0.5 if scale is None else scale
    group = query.shape[1] // key.shape[1]
    for own, seen, scores in _documents(query, key, cu_seq_q, cu_seq_k, window_size, scale):
        weights, grad = scores.softmax(-1), grad_out[own]
        keys, values = (each[seen].repeat_interleave(group, 1) for each in (key, value))
        of_weights = torch.einsum("qhd,khd->hqk", grad, values)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scaled
        found[0][own] += torch.einsum("hqk,khd->qhd", of_scores, keys)
        of_keys = torch.einsum("hqk,qhd->khd", of_scores, query[own])
        of_values = torch.einsum("hqk,qhd->khd", weights, grad)
        for total, part in ((found[1], of_keys), (found[2], of_values)):
            total[seen] += part.unflatten(1, (-1, group)).sum(2)
    return found[0], found[1], found[2]


def add_kernels() -> None:
    """Register the kernels in this process, once."""
    if not hasattr(varlen, "_echelon_has_cpu"):
        varlen._varlen_attn.register_kernel("cpu")(attend)
        varlen._varlen_attn_backward.register_kernel("cpu")(attend_backward)
        vars(varlen)["_echelon_has_cpu"] = True
