"""Attention within a window or inside documents gets the tokens of other ranks that it reaches, and no others."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from sweep import IS_SWEEP
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

from echelon import document_mask
from echelon.strategies.context_parallel.attention import AttentionMode
from echelon.strategies.context_parallel.exchange import Exchange
from echelon.strategies.context_parallel.overridable import make_attention_overridable
from echelon.strategies.context_parallel.sequence import SequenceLayout
from echelon.testing import run_ranks

WIDTH, LENGTH = 16, 64
CASES: dict[str, dict[str, Any]] = {
    "no window": {},
    "window": {"window": 5},
    "window, length that the ranks do not divide": {"window": 5, "length": 61},
    "both sides": {"window": 3, "is_causal": False},
    "window longer than a chunk": {"window": 20},
    "window of all": {"window": LENGTH},
    "window and chunks": {"window": 6, "chunk": 8},
    "documents": {"documents": 8},
    "documents, both sides": {"documents": 8, "is_causal": False},
    "documents in a window": {"documents": 8, "window": 3},
    "one document in one sequence": {"documents": 8, "whole": True},
    "documents in pieces": {"documents": 8, "pieces": True},
}
WITH_FLEX = (
    (*CASES,) if IS_SWEEP else ("window, length that the ranks do not divide", "both sides", "documents in pieces")
)
"""Cases in which FlexAttention computes the same, which is traced anew for each."""


class Sent(TorchDispatchMode):
    """Counts the bytes that this rank sends to others."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.bytes = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in ("_allgather_base_", "alltoall_base_"):
            copies = self.size - 1 if name == "_allgather_base_" else 1
            self.bytes += copies * args[1].numel() * args[1].element_size()
        return func(*args, **(kwargs or {}))


def compare(size: int) -> dict[str, Any]:
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # that FlexAttention is not compiled
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    make_attention_overridable()
    dist.init_process_group("gloo")
    cut = SequenceLayout(size, dist.get_rank(), num_chunks=2)
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        options = dict(case)
        length = options.pop("length", LENGTH)
        ids = torch.zeros(2, length, dtype=torch.long)
        ids[1, length // 3 :] = 1
        if (documents := options.pop("documents", None)) is not None:
            ids = (torch.arange(length) // documents).expand(2, length).clone()
        if options.pop("whole", False):
            ids[1] = 0
        if options.pop("pieces", False):
            ids[0] %= 4  # a number comes again at another place
        whole = [torch.randn(2, 2, length, WIDTH, requires_grad=True) for _ in range(3)]
        expected = F.scaled_dot_product_attention(*whole, document_mask(ids, **options))
        weights = torch.randn_like(expected)
        (expected * weights).sum().backward()
        exchange = Exchange(None, cut)
        exchange.lengths.begin({length})
        parts = [cut.take(tensor.detach(), -2).requires_grad_() for tensor in whole]
        with AttentionMode(exchange, "allgather"):
            mask = document_mask(cut.take(ids, 1), **options)
            with Sent(size) as forward:
                output = F.scaled_dot_product_attention(*parts, mask)
            block_mask = document_mask(cut.take(ids, 1), **options, kind="flex")
            if name in WITH_FLEX:
                blocks: Any = flex_attention(*(part.detach() for part in parts), block_mask=block_mask)
        (output * cut.take(weights, -2)).sum().backward()
        pairs = zip([output, *(p.grad for p in parts)], [expected, *(w.grad for w in whole)], strict=True)
        difference = max((own - cut.take(one, -2)).abs().max().item() for own, one in pairs if own is not None)
        if name in WITH_FLEX:
            difference = max(difference, (blocks - output).abs().max().item())
        found[name] = difference, forward.bytes, block_mask.seq_lengths[1]
    return found


@pytest.mark.only_in_sweep
@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.only_in_sweep)])
def test_keys_of_a_window_are_exchanged_as_far_as_it_reaches(size: int) -> None:
    token = 2 * 2 * WIDTH * 8 * 2  # of two sequences with two heads, key and value in float64
    ranks = run_ranks(compare, size, size)
    for found in ranks:
        assert max(difference for difference, _, _ in found.values()) < 1e-14, found
        assert found["no window"][1] == found["window of all"][1] == (size - 1) * LENGTH // size * token
    sent = {name: sum(found[name][1] for found in ranks) for name in CASES}
    # a chunk needs 4 tokens before it, unless it is the first one or the same rank has them
    assert sent["window"] <= 4 * (2 * size - 1) * token
    assert sent["both sides"] <= 2 * 2 * (2 * size - 1) * token
    assert 0 < sent["window"] < sent["window longer than a chunk"] <= sent["no window"]
    # documents of 8 tokens: none lies on two ranks' chunks of 16 or 8 tokens
    assert sent["documents"] == sent["documents, both sides"] == sent["documents in a window"] == 0
    assert sent["one document in one sequence"] == sent["no window"]
    assert 0 < sent["documents in pieces"] <= sent["no window"]
    for found in ranks:  # a block mask has columns for the keys that are sent, and those of the rank itself
        assert found["documents"][2] == LENGTH // size
        assert found["no window"][2] == LENGTH
        assert LENGTH // size < found["window"][2] < LENGTH
