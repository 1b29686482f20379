"""Attention over sequences cut over two ranks equals attention over whole ones: outputs and gradients."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from echelon.common.errors import EchelonError
from echelon.strategies.context_parallel.attention import AttentionMode
from echelon.strategies.context_parallel.exchange import Exchange
from echelon.strategies.context_parallel.sequence import SequenceLayout
from echelon.testing import run_ranks

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 16, 4
SIZE = 2


def join():
    import torch.distributed as dist

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    return dist.get_rank()


def mode_of(kind, rank, length=LENGTH, num_chunks=2):
    cut = SequenceLayout(SIZE, rank, num_chunks if kind == "allgather" else 1)
    exchange = Exchange(None, cut)
    exchange.lengths.begin({length})
    return cut, AttentionMode(exchange, kind)


def padding(length=LENGTH):
    """Return which keys each sequence has."""
    return torch.arange(length) < torch.tensor([length, length - 5])[:, None]


FUNCTIONS = {
    "plain": ((HEADS, HEADS), LENGTH, {}, None),
    "causal": ((HEADS, HEADS), LENGTH, {"is_causal": True}, None),
    "causal, odd parts": ((HEADS, HEADS), 6, {"is_causal": True}, None),
    "causal, parts of different lengths": ((HEADS, HEADS), 7, {"is_causal": True}, None),
    "causal, six chunks": ((HEADS, HEADS), LENGTH, {"is_causal": True}, None),
    "causal, six chunks, some of them empty": ((HEADS, HEADS), 7, {"is_causal": True}, None),
    "rows, six chunks": ((HEADS, HEADS), LENGTH, {}, torch.rand(BATCH, 1, LENGTH, LENGTH) > 0.3),
    "padding, parts of different lengths": ((HEADS, HEADS), 7, {}, padding(7)[:, None, None]),
    "rows, parts of different lengths": ((HEADS, HEADS), 7, {}, torch.rand(BATCH, 1, 7, 7) > 0.3),
    "scaled": ((HEADS, HEADS), LENGTH, {"scale": 0.3, "is_causal": True}, None),
    "grouped queries": ((HEADS, 2), LENGTH, {"is_causal": True, "enable_gqa": True}, None),
    "padding": ((HEADS, HEADS), LENGTH, {}, padding()[:, None, None]),
    "rows": ((HEADS, HEADS), LENGTH, {}, torch.rand(BATCH, 1, LENGTH, LENGTH) > 0.3),
    "rows by head": ((HEADS, HEADS), LENGTH, {}, torch.randn(HEADS, LENGTH, LENGTH, dtype=torch.float64)),
}


def compare_functions(kind, cases):
    rank = join()
    differences = {}
    for name, ((heads, key_heads), length, options, mask) in cases.items():
        cut, mode = mode_of(kind, rank, length, 6 if "six chunks" in name else 2)
        whole = [torch.randn(BATCH, n, length, WIDTH, requires_grad=True) for n in (heads, key_heads, key_heads)]
        expected = F.scaled_dot_product_attention(*whole, mask, **options)
        weights = torch.randn_like(expected)
        (expected * weights).sum().backward()
        parts = [cut.take(tensor.detach(), -2).requires_grad_() for tensor in whole]
        rows = mask if mask is None or mask.shape[-2] == 1 else cut.take(mask, -2)
        columns = rows if mask is None or mask.shape[-2] > 1 else cut.take(rows, -1)
        with mode:
            output = F.scaled_dot_product_attention(*parts, columns, **options)
        (output * cut.take(weights, -2)).sum().backward()
        found = [output, *(part.grad for part in parts)]
        wanted = [cut.take(tensor, -2) for tensor in (expected, *(tensor.grad for tensor in whole))]
        differences[name] = max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))
    return differences


@pytest.mark.parametrize("kind", ["allgather", "ulysses"])
def test_outputs_and_gradients_are_those_of_whole_sequences(kind):
    for differences in run_ranks(compare_functions, SIZE, kind, FUNCTIONS):
        assert max(differences.values()) < 1e-14, differences
        assert differences.keys() == FUNCTIONS.keys()


def compare_modules(kind):
    rank = join()
    cut, mode = mode_of(kind, rank)
    differences = {}
    x = torch.randn(BATCH, LENGTH, 8)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    own_causal = torch.ones(LENGTH // SIZE, LENGTH // SIZE, dtype=torch.bool).triu(1)
    cases = {
        "attention": (nn.MultiheadAttention(8, HEADS, batch_first=True), {}, {}),
        "without bias, of several widths": (
            nn.MultiheadAttention(8, HEADS, bias=False, kdim=8, vdim=8, batch_first=True),
            {"need_weights": False},
            {"need_weights": False},
        ),
        "padding": (
            nn.MultiheadAttention(8, HEADS, batch_first=True),
            {"key_padding_mask": ~padding()},
            {"key_padding_mask": cut.take(~padding(), 1)},
        ),
        "causal": (
            nn.MultiheadAttention(8, HEADS, batch_first=True),
            {"attn_mask": causal, "is_causal": True, "need_weights": False},
            {"attn_mask": own_causal, "is_causal": True, "need_weights": False},
        ),
        "causal and padding": (
            nn.MultiheadAttention(8, HEADS, batch_first=True),
            {"attn_mask": causal, "is_causal": True, "key_padding_mask": ~padding()},
            {"attn_mask": own_causal, "is_causal": True, "key_padding_mask": cut.take(~padding(), 1)},
        ),
        "mask of rows": (
            nn.MultiheadAttention(8, HEADS, batch_first=True),
            {"attn_mask": causal, "average_attn_weights": False},
            {"attn_mask": cut.take(causal, 0), "average_attn_weights": False},
        ),
    }
    for name, (module, options, own_options) in cases.items():
        expected, expected_weights = module(x, x, x, **options)
        part = cut.take(x, 1).requires_grad_()
        with mode:
            output, weights = module(part, part, part, **own_options)
        differences[name] = (output - cut.take(expected, 1)).abs().max().item()
        if weights is not None:
            own = cut.take(expected_weights, expected_weights.ndim - 2)
            differences[f"{name}, weights"] = (weights - own).abs().max().item()
    layer = nn.TransformerEncoderLayer(8, HEADS, 16, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        expected = encoder(x)
        with mode:
            output = encoder(cut.take(x, 1))
    differences["encoder in eval mode"] = (output - cut.take(expected, 1)).abs().max().item()
    return differences


@pytest.mark.parametrize("kind", ["allgather", "ulysses"])
def test_torchs_attention_modules_work_on_parts(kind):
    for differences in run_ranks(compare_modules, SIZE, kind):
        assert max(differences.values()) < 1e-14, differences


def refuse(kind):
    rank = join()
    _, mode = mode_of(kind, rank)
    x = torch.randn(BATCH, HEADS, LENGTH // SIZE, WIDTH)
    other = torch.randn(BATCH, HEADS, LENGTH // SIZE + 1, WIDTH)
    three_heads = torch.randn(BATCH, 3, LENGTH // SIZE, WIDTH)
    local_mask = torch.ones(LENGTH // SIZE, LENGTH // SIZE, dtype=torch.bool).tril()
    attempts = {
        "keys": lambda: F.scaled_dot_product_attention(other, other, other),
        "queries": lambda: F.scaled_dot_product_attention(other, x, x, is_causal=True),
        "mask": lambda: F.scaled_dot_product_attention(x, x, x, local_mask),
        "bias": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True)(x[0], x[0], x[0]),
        "heads": lambda: F.scaled_dot_product_attention(three_heads, three_heads, three_heads),
    }
    errors = {}
    for name, attempt in attempts.items():
        try:
            with mode:
                attempt()
        except EchelonError as error:
            errors[name] = str(error)
    return errors


def test_what_cannot_be_cut_is_refused_with_the_remedy():
    errors = run_ranks(refuse, SIZE, "ulysses")[0]
    assert "got 9 keys" in errors["keys"]
    assert "as many queries as keys, got 9 and 8" in errors["queries"]
    assert "a column for each of the 16 keys" in errors["mask"]
    assert "add_bias_kv=True" in errors["bias"]
    assert "cp_exchange='allgather'" in errors["heads"]
    assert "got 3 query heads" in errors["heads"]


def keep_for_backward():
    rank = join()
    cut, mode = mode_of("allgather", rank)
    whole = torch.randn(BATCH, HEADS, LENGTH, WIDTH)
    tensors = [cut.take(whole, -2).requires_grad_() for _ in range(3)]
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), mode:
        F.scaled_dot_product_attention(*tensors, is_causal=True)
    return sum(kept.values())


def test_a_rank_does_not_keep_the_keys_of_others_for_backward():
    part = BATCH * HEADS * LENGTH * WIDTH // SIZE * 8
    masks = sum(LENGTH // 4 * LENGTH * 8 for _ in range(2))
    # query, key, value, output and a number for each query
    assert run_ranks(keep_for_backward, SIZE)[0] <= 2 * part + part // WIDTH + masks


@pytest.mark.parametrize("num_chunks", [2, 4, 8])
def test_each_rank_has_as_much_causal_attention_to_compute(num_chunks):
    costs = [work_of(SequenceLayout(4, rank, num_chunks), torch.arange(64)) for rank in range(4)]
    assert len(set(costs)) == 1
    assert math.isclose(sum(costs), 64 * 65 / 2)


def work_of(cut, places):
    """Return how many keys the tokens of a rank attend to, given the places of all tokens in their documents."""
    return int((cut.take(places, 0) + 1).sum())


def test_more_chunks_even_out_the_work_inside_of_documents():
    generator = torch.Generator().manual_seed(1)
    packs = []
    while len(packs) < 20:
        lengths = torch.randn(64, generator=generator).mul(0.8).add(5.9).exp().int().tolist()  # 500 in the mean
        packs.append(torch.cat([torch.arange(length) for length in lengths])[:2048])
    shares = {}
    for num_chunks in (2, 8, 32):
        cuts = [SequenceLayout(4, rank, num_chunks) for rank in range(4)]
        work = torch.tensor([[work_of(cut, places) for cut in cuts] for places in packs])
        shares[num_chunks] = float((work.max(1).values * 4 / work.sum(1)).mean())
    assert shares[2] > 1.3 > shares[8] > 1.1 > shares[32]


@pytest.mark.parametrize("length", range(8, 60))
def test_parts_differ_by_one_token_at_most(length):
    for size, num_chunks in ((4, 2), (3, 4), (2, 16), (4, 6)):
        parts = [SequenceLayout(size, rank, num_chunks).part_length(length) for rank in range(size)]
        assert sum(parts) == length and max(parts) - min(parts) <= 1
        assert max(parts) == SequenceLayout(size, 0, num_chunks).longest_part(length)


def test_parts_join_to_the_whole():
    whole = torch.arange(24).reshape(2, 12)
    for size, num_chunks in ((2, 2), (2, 1), (3, 2), (4, 2), (5, 2), (5, 1), (6, 1), (12, 2), (2, 4), (3, 6), (2, 8)):
        cuts = [SequenceLayout(size, rank, num_chunks) for rank in range(size)]
        parts = [cut.take(whole, 1) for cut in cuts]
        assert torch.equal(cuts[0].join(parts, 1, 12), whole)
        for cut, part in zip(cuts, parts, strict=True):
            assert torch.equal(part[0], cut.positions(12))
