"""Correct plans compute what the whole module does; wrong ones are refused, naming the block."""

import copy
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon.common.errors import ModuleError
from echelon.strategies.state.dtensor import is_dtensor, whole_tensor
from echelon.strategies.tensor_parallel.check.block_check import BlockCheck
from echelon.strategies.tensor_parallel.cutting import cut_module
from echelon.strategies.tensor_parallel.find_plan import find_plan
from echelon.testing import run_ranks


class Float32Norm(nn.LayerNorm):
    """A norm that computes in float32, whatever it gets, as Qwen 3's and Gemma 3's do."""

    def forward(self, x):
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias).to(x.dtype)


class Attention(nn.Module):
    """Four heads of width 4, with the faults that a module may have."""

    def __init__(self, fault="", key_heads=4):
        super().__init__()
        self.fault, self.num_heads = fault, 4
        self.q_proj, self.o_proj = nn.Linear(16, 16), nn.Linear(16, 16)
        self.k_proj, self.v_proj = nn.Linear(16, 4 * key_heads), nn.Linear(16, 4 * key_heads)
        self.q_norm = nn.Identity()
        if "norm" in fault:
            self.q_norm = Float32Norm(4) if "float32" in fault else nn.LayerNorm(4)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x):
        shape = (-1, 4)
        if self.fault == "attribute":
            shape = (self.num_heads, -1)
        elif self.fault == "fixed heads":
            shape = (4, -1)
        q, k, v = (layer(x).unflatten(-1, shape).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q = self.q_norm(q)
        if self.fault == "temperature":
            q = q * self.temperature
        mask = None
        if self.fault == "slopes":
            slopes = 2.0 ** -torch.arange(1, q.shape[1] + 1, dtype=x.dtype)
            mask = slopes.view(-1, 1, 1) * -torch.arange(x.shape[1], dtype=x.dtype)
        is_grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=is_grouped).transpose(1, 2).flatten(2)
        return self.o_proj(out)


class WithWeights(nn.Module):
    """An attention that returns its weights by head as well, as transformers' eager attention does, and its caller."""

    def __init__(self, reads=False):
        super().__init__()
        self.layer, self.reads = Weighing(), reads

    def forward(self, x):
        out, weights = self.layer(x)
        return x + out + weights.mean() if self.reads else x + out


class Weighing(nn.Module):
    """Four heads of width 4, and their weights."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        weights = (q @ k.mT / 2).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2)), weights


class FeedForward(nn.Module):
    """Layers with a function of the hidden features between them."""

    def __init__(self, function=torch.tanh, hidden=32, taken=32, out=16):
        super().__init__()
        self.up, self.down, self.function = nn.Linear(16, hidden), nn.Linear(taken, out), function

    def forward(self, x):
        return self.down(self.function(self.up(x)))


class Packed(nn.Module):
    """An attention with one layer for queries, keys and values."""

    def __init__(self, by_head=False):
        super().__init__()
        self.qkv, self.out, self.by_head = nn.Linear(16, 48), nn.Linear(16, 16), by_head

    def forward(self, x):
        packed = self.qkv(x)
        if self.by_head:
            q, k, v = packed.unflatten(-1, (-1, 3, 4)).transpose(1, 2).unbind(3)
        else:
            q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in packed.chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Residual(nn.Module):
    """A layer inside a block, next to others."""

    def __init__(self, layer, **others):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(16), layer
        self.others = nn.ModuleDict(others)

    def forward(self, x):
        x = x + self.layer(self.norm(x))
        for other in self.others.values():
            x = other(x)
        return x


class Words(nn.Module):
    """An embedding, a head, and maybe one weight for both."""

    def __init__(self, *, is_tied=True, has_loss=False):
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(12, 16, padding_idx=8), FeedForward(), nn.Linear(16, 12)
        self.has_loss = has_loss
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        logits = self.head(self.layer(self.table(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten() % 6) if self.has_loss else logits


def floats():
    return (torch.randn(3, 6, 16),), {}


def tokens():
    return (torch.randint(0, 12, (3, 6)),), {}


def images(size=8):
    return (torch.randn(2, 3, size, size),), {}


def padded():
    return (torch.randn(6, 3, 16),), {"src_key_padding_mask": torch.arange(6) >= torch.tensor([[6], [4], [5]])}


def pairs_of_sequences():
    return (torch.randn(3, 6, 16), torch.randn(3, 5, 16)), {"tgt_mask": torch.ones(6, 6).triu(1).bool()}


def llama(**settings):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=12, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, pad_token_id=None, **{"intermediate_size": 32, **settings},
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def gpt2(**settings):
    import transformers

    settings |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=12, bos_token_id=1, eos_token_id=2, n_positions=8, n_embd=16, n_layer=2, n_head=4, **settings
        )
    )


def minicpm3():
    import transformers

    return transformers.MiniCPM3ForCausalLM(
        transformers.MiniCPM3Config(
            vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
            max_position_embeddings=32, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        )
    )  # fmt: skip


def gemma2():
    import transformers

    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=4,
            num_key_value_heads=2, max_position_embeddings=32, pad_token_id=None, attn_implementation="eager",
        )
    )  # fmt: skip


def bert():
    import transformers

    config = transformers.BertConfig(
        vocab_size=12, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertModel(config)


def vit(image_size=8):
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=image_size, patch_size=4, num_layers=2, num_heads=4, hidden_dim=16, mlp_dim=32, num_classes=5
    )


def encoder():
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def decoder_layer():
    return nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True)


def decoder():
    return nn.TransformerDecoder(decoder_layer(), 2)


def torch_styles():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {"layer.up": ColwiseParallel(), "layer.down": RowwiseParallel()}


ATTENTION = {"layer.[qkv]_proj": "colwise", "layer.o_proj": "rowwise"}
PAIR = {"layer.up": "colwise", "layer.down": "rowwise"}
PACKED = {"layer.qkv": "packed_colwise", "layer.out": "rowwise"}


@dataclass
class Case:
    """A module, its plan, and inputs."""

    make: Callable[[], nn.Module]
    plan: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None
    inputs: Callable[[], Any] = floats
    block: str = "layer"
    """The block that the error names if the plan is wrong."""
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-12


RIGHT = {
    "llama": Case(llama, None, tokens),
    "llama, eager": Case(lambda: llama(attn_implementation="eager"), None, tokens),
    "gpt2, eager": Case(lambda: gpt2(attn_implementation="eager"), None, tokens),
    "gemma 2, eager": Case(gemma2, None, tokens),
    "llama, eager, shards": Case(
        lambda: llama(attn_implementation="eager"), None, tokens, options={"sequence_parallel": True}
    ),
    "weights of heads": Case(WithWeights, ATTENTION),
    "llama, tied": Case(lambda: llama(tie_word_embeddings=True), None, tokens),
    "gpt2": Case(gpt2, None, tokens),
    "bert": Case(bert, None, tokens),
    "vit": Case(vit, None, images),
    "encoder": Case(encoder, None, padded),
    "decoder layer": Case(decoder_layer, None, pairs_of_sequences),
    "chain": Case(lambda: nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Dropout(0.0), nn.Linear(8, 16))),
    "heads as an attribute": Case(lambda: Residual(Attention("attribute"))),
    "norm of heads": Case(lambda: Residual(Attention("norm"))),
    "norm of heads without a word": Case(lambda: Residual(Attention("norm")), ATTENTION),
    "norm of heads in float32": Case(lambda: Residual(Attention("float32 norm")), tolerance=1e-6),
    "latent keys": Case(minicpm3, None, tokens, tolerance=1e-6),
    "feed-forward of an odd width": Case(lambda: llama(intermediate_size=33), None, tokens),
    "grouped queries": Case(lambda: Residual(Attention(key_heads=2)), ATTENTION),
    "packed": Case(lambda: Residual(Packed()), PACKED),
    "packed, found": Case(lambda: Residual(Packed())),
    "table and head": Case(Words, {**PAIR, "table": "embedding_rowwise", "head": "colwise_gather_output"}, tokens),
    "columns of a table": Case(lambda: Words(is_tied=False), {"table": "embedding_colwise"}, tokens),
    "split input": Case(lambda: Residual(FeedForward()), {"layer.down": "rowwise_split_input"}),
    "norm of a sequence": Case(lambda: Residual(FeedForward()), {"norm": "sequence_parallel"}),
    "llama, shards": Case(llama, None, tokens, options={"sequence_parallel": True}),
    "gpt2, shards": Case(gpt2, None, tokens, options={"sequence_parallel": True}),
    "vit, shards": Case(lambda: vit(image_size=12), None, lambda: images(12), options={"sequence_parallel": True}),
    "encoder, shards": Case(encoder, None, padded, options={"sequence_parallel": True}),
    "decoder, shards": Case(decoder, None, pairs_of_sequences, options={"sequence_parallel": True}),
    "torch's styles": Case(lambda: Residual(FeedForward()), torch_styles, block=""),
}
WRONG = {
    "a fixed number of heads": Case(lambda: Residual(Attention("fixed heads")), ATTENTION),
    "a number of heads that is not divided": Case(lambda: Residual(Attention("attribute")), ATTENTION),
    "a parameter amid heads": Case(lambda: Residual(Attention("temperature")), ATTENTION),
    "positions by heads": Case(lambda: Residual(Attention("slopes")), ATTENTION),
    "whole keys of grouped queries": Case(
        lambda: Residual(Attention(key_heads=2)), {"layer.q_proj": "colwise", "layer.o_proj": "rowwise"}
    ),
    "weights of heads that are used": Case(lambda: WithWeights(reads=True), ATTENTION),
    "packed as one": Case(lambda: Residual(Packed()), {**PACKED, "layer.qkv": "colwise"}),
    "packed by heads": Case(lambda: Residual(Packed(by_head=True)), PACKED),
    "a gate in halves": Case(lambda: Residual(FeedForward(F.glu, taken=16)), PAIR),
    "a norm of features": Case(lambda: Residual(FeedForward(lambda x: F.layer_norm(x, x.shape[-1:]))), PAIR),
    "a softmax of features": Case(lambda: Residual(FeedForward(lambda x: x.softmax(-1))), PAIR),
    "shifted features": Case(lambda: Residual(FeedForward(lambda x: x.roll(1, -1))), PAIR),
    "a mean of features": Case(
        lambda: Residual(FeedForward(lambda x: x.mean(-1, keepdim=True).expand(*x.shape[:-1], 16), taken=16)),
        {"layer.up": "colwise"},
    ),
    "a sum of sums": Case(lambda: Residual(FeedForward()), {**PAIR, "layer": "all_reduce"}, block=""),
    "gradients summed twice": Case(
        lambda: Residual(FeedForward()), {**PAIR, "norm": "replicated_with_grad_allreduce"}, block=""
    ),
    "half of the vocabulary": Case(lambda: Words(is_tied=False, has_loss=True), {"head": "colwise"}, tokens, block=""),
    "a table that feeds half of a layer": Case(
        lambda: Residual(nn.Sequential(nn.Linear(16, 16), nn.Softmax(-1), nn.Linear(16, 16))),
        {"layer.0": "colwise", "layer.2": "rowwise"},
    ),
}


def made(case):
    torch.manual_seed(1)
    module = case.make().double()
    args, kwargs = case.inputs()
    plan = case.plan() if callable(case.plan) else case.plan
    return (
        module,
        find_plan(module, plan, **case.options),
        [x.double() if x.is_floating_point() else x for x in args],
        kwargs,
    )


def losses(output):
    return output if torch.is_tensor(output) else output[0]


def gradients_of(output, direction, module, args):
    sources = dict(module.named_parameters()) | {f"input {at}": x for at, x in enumerate(args) if x.requires_grad}
    gradients = torch.autograd.grad(output, list(sources.values()), direction, allow_unused=True)
    named = {name: gradient for name, gradient in zip(sources, gradients, strict=True) if gradient is not None}
    return {name: whole_tensor(g) if is_dtensor(g) else g for name, g in named.items()}


def compare(case, mesh):
    module, plan, args, kwargs = made(case)
    plan.validate(module, 2)
    whole = copy.deepcopy(module)
    check = BlockCheck(module, plan, mesh)
    cut_module(module, plan, mesh)
    before = torch.get_rng_state()
    with check.during(is_training=True):
        output = losses(module(*args, **kwargs))
    is_untouched = torch.equal(before, torch.get_rng_state()) and all(p.grad is None for p in module.parameters())
    expected = losses(whole(*args, **kwargs))
    errors = {"output": float((output - expected).detach().abs().max())}
    direction = torch.randn(output.shape, dtype=output.dtype)
    gradients = gradients_of(output, direction, module, args)
    for name, gradient in gradients_of(expected, direction, whole, args).items():
        errors[name] = float((gradients[name] - gradient).abs().max() / (1 + gradient.abs().max()))
    return check.is_complete, is_untouched, errors


def refused(case, mesh):
    module, plan, args, kwargs = made(case)
    check = BlockCheck(module, plan, mesh)
    cut_module(module, plan, mesh)
    try:
        with check.during(is_training=True):
            module(*args, **kwargs)
    except ModuleError as error:
        return str(error)
    return None


def held_whole(mesh):
    """Return the number of whole weights in memory once the module is cut, and once it is checked."""
    block = FeedForward(hidden=34, taken=34)
    block.forward = block.forward  # the module refers to itself, so that only a garbage collection frees it
    module = nn.Sequential(block)

    def count():
        tensors = (held for held in gc.get_objects() if type(held) in (torch.Tensor, nn.Parameter))
        return sum(not t.is_meta and t.untyped_storage().nbytes() == 34 * 16 * 4 for t in tensors)

    gc.collect()
    gc.disable()
    try:
        plan = find_plan(module, {"0.up": "colwise", "0.down": "rowwise"})
        check = BlockCheck(module, plan, mesh)
        counts = [count()]
        cut_module(module, plan, mesh)
        counts.append(count())
        with check.during(is_training=True):
            module(torch.randn(3, 16))
        return *counts, count()
    finally:
        gc.enable()


def run_all():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    outcomes = {"whole weights": held_whole(mesh)}
    for function, cases in ((compare, RIGHT), (refused, WRONG)):
        for name, case in cases.items():
            try:
                outcomes[name] = function(case, mesh)
            except Exception as error:  # noqa: BLE001 one case does not hide the others
                outcomes[name] = error
    return outcomes


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(run_all, 2, timeout=960)


def test_no_whole_weight_stays_in_memory(outcomes):
    for rank in outcomes:
        assert rank["whole weights"] == (2, 0, 0)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_plan_computes_what_the_whole_module_does(outcomes, name):
    for rank in outcomes:
        if isinstance(rank[name], Exception):
            raise rank[name]
        is_complete, is_untouched, errors = rank[name]
        assert is_complete
        assert is_untouched
        assert {key: value for key, value in errors.items() if not value <= RIGHT[name].tolerance} == {}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_refused_by_the_name_of_its_block(outcomes, name):
    for rank in outcomes:
        if isinstance(rank[name], Exception):
            raise rank[name]
        assert f"the block {WRONG[name].block!r}" in str(rank[name])
