"""An nn.MultiheadAttention whose heads are split over ranks returns what the whole one does, for every argument."""

import copy

import pytest
import torch
from torch import nn

from echelon.strategies.context_parallel.attention import AttentionMode
from echelon.strategies.context_parallel.exchange import Exchange
from echelon.strategies.context_parallel.sequence import SequenceLayout
from echelon.strategies.state.dtensor import is_dtensor, whole_tensor
from echelon.strategies.tensor_parallel.cutting import cut_module
from echelon.strategies.tensor_parallel.find_plan import find_plan
from echelon.testing import run_ranks

HIDDEN, PADDED = torch.ones(5, 5).triu(1).bool(), torch.arange(5) >= torch.tensor([[5], [3], [4]])
BY_HEAD = torch.arange(12 * 5 * 5).view(12, 5, 5).double().sin()

# settings of the module, options of its forward, and whether keys and values are another sequence
CASES = {
    "weights": ({}, {}, False),
    "weights by head": ({}, {"average_attn_weights": False}, False),
    "no weights": ({}, {"need_weights": False}, False),
    "length first": ({"batch_first": False}, {}, False),
    "no bias": ({"bias": False}, {}, False),
    "another sequence": ({}, {}, True),
    "other widths": ({"kdim": 6, "vdim": 10}, {}, True),
    "extra keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"attn_mask": HIDDEN}, False),
    "extra keys, no weights": ({"add_bias_kv": True}, {"key_padding_mask": PADDED, "need_weights": False}, False),
    "padding": ({}, {"key_padding_mask": PADDED}, False),
    "causal": ({}, {"attn_mask": HIDDEN, "is_causal": True, "need_weights": False}, False),
    "causal and padding": ({}, {"attn_mask": HIDDEN, "key_padding_mask": PADDED, "is_causal": True}, False),
    "masks by head": ({}, {"attn_mask": BY_HEAD, "need_weights": False}, False),
    "one sequence": ({}, {"attn_mask": HIDDEN}, None),
}


def inputs_of(case):
    settings, _, has_memory = CASES[case]
    q = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    if has_memory is None:
        q = q.detach()[0].requires_grad_()
    if not settings.get("batch_first", True):
        q = q.detach().transpose(0, 1).contiguous().requires_grad_()
    if not has_memory:
        return q, q, q
    widths = settings.get("kdim", 8), settings.get("vdim", 8)
    k, v = (torch.randn(3, 7, width, dtype=torch.float64, requires_grad=True) for width in widths)
    return q, k, k if "kdim" not in settings else v


def outcome_of(module, inputs, options):
    outputs = [t for t in module(*inputs, **options) if t is not None]
    sources = [p for p in [*module.parameters(), *dict.fromkeys(inputs)] if p.requires_grad]
    total = sum((t * torch.arange(t.numel()).view(t.shape).sin()).sum() for t in outputs)
    gradients = torch.autograd.grad(total, sources)
    return [whole_tensor(g) if is_dtensor(g) else g.detach() for g in (*outputs, *gradients)]


def compare(case, mesh):
    settings, options, _ = CASES[case]
    torch.manual_seed(1)
    whole = nn.MultiheadAttention(8, 4, **{"batch_first": True, **settings}).double()
    nn.init.normal_(whole.in_proj_bias) if whole.in_proj_bias is not None else None
    module, inputs = nn.ModuleDict({"attention": copy.deepcopy(whole)}), inputs_of(case)
    cut_module(module, find_plan(module), mesh)
    cut = module["attention"]
    results = [outcome_of(m, inputs, options) for m in (cut, whole)]
    with torch.no_grad():
        results.append([t for t in cut.eval()(*inputs, **options) if t is not None])
        results.append([t for t in whole.eval()(*inputs, **options) if t is not None])
    errors = [float((a - b).abs().max()) for pair in (results[:2], results[2:]) for a, b in zip(*pair, strict=True)]
    return max(errors)


def run_all():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return {case: compare(case, mesh) for case in CASES}


@pytest.fixture(scope="module")
def errors():
    return run_ranks(run_all, 2, timeout=480)


@pytest.mark.parametrize("case", CASES)
def test_some_heads_return_what_all_do(errors, case):
    for rank in errors:
        assert rank[case] <= 1e-12


CUT_TWICE = {
    "weights": ({}, {}),
    "weights by head": ({}, {"average_attn_weights": False}),
    "causal, length first": ({"batch_first": False}, {"is_causal": True, "need_weights": False}),
    "other widths": ({"kdim": 6, "vdim": 6}, {"need_weights": False}),
}


def compare_amid_context_parallel(case, mesh):
    settings, options = CUT_TWICE[case]
    torch.manual_seed(1)
    layout = SequenceLayout(2, mesh["cp"].get_local_rank(), num_chunks=2)
    exchange = Exchange(mesh["cp"].get_group(), layout)
    exchange.lengths.begin({8})
    mode = AttentionMode(exchange, "allgather")
    whole = nn.MultiheadAttention(8, 4, **{"batch_first": True, **settings}).double()
    cut = copy.deepcopy(whole)
    cut_module(nn.ModuleDict({"attention": cut}), find_plan(nn.ModuleDict({"attention": cut})), mesh["tp"])
    dim = 1 if whole.batch_first else 0
    q, k = torch.randn(8, 8, 8).double(), torch.randn(8, 8, 6).double()
    inputs = (q, k, k) if "kdim" in settings else (q, q, q)
    own = {id(t): layout.take(t, dim) for t in inputs}
    causal = {"attn_mask": torch.ones(8, 8).triu(1).bool()} if options.get("is_causal") else {}
    own_causal = {"attn_mask": torch.ones(4, 4).triu(1).bool()} if causal else {}
    expected = whole(*inputs, **options, **causal)
    with mode:
        output = cut(*(own[id(t)] for t in inputs), **options, **own_causal)
    rows = [layout.take(expected[0], dim)]
    if expected[1] is not None:
        rows.append(layout.take(expected[1], -2))
    return max(float((a - b).detach().abs().max()) for a, b in zip(output, rows, strict=False) if a is not None)


def run_all_amid_context_parallel():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    return {case: compare_amid_context_parallel(case, mesh) for case in CUT_TWICE}


def test_some_heads_attend_to_sequences_that_are_cut_as_well():
    for errors in run_ranks(run_all_amid_context_parallel, 4, timeout=480):
        assert {case: error for case, error in errors.items() if not error <= 1e-12} == {}
