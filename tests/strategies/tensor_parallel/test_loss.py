"""Logits that stay cut by vocabulary give the loss and the gradients of whole ones."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from echelon.common.errors import ConfigError
from echelon.strategies.tensor_parallel.check.block_check import BlockCheck
from echelon.strategies.tensor_parallel.cutting import cut_module
from echelon.strategies.tensor_parallel.find_plan import find_plan
from echelon.strategies.tensor_parallel.loss import loss_context
from echelon.testing import run_ranks

VOCABULARY = 11
"""Two ranks have six words and five."""


class Words(nn.Module):
    def __init__(self, *, is_tied=False, has_bias=True):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 8)
        self.layer = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, VOCABULARY, bias=has_bias)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.layer(self.table(tokens)))


class Llama(nn.Module):
    def __init__(self):
        import transformers

        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32, pad_token_id=None,
        )  # fmt: skip
        self.model = transformers.LlamaForCausalLM(config)

    def forward(self, tokens):
        return self.model(tokens)


def shifted(logits, tokens, **options):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), **options)


def ignoring(logits, tokens):
    return shifted(logits, tokens.masked_fill(tokens < 4, -100))


def mean_over_ranks_of_tokens(logits, tokens):
    return shifted(logits, tokens, reduction="sum") / 7


def by_position(logits, tokens):
    return F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none").square().mean()


def of_probabilities(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), F.one_hot(tokens.flatten(), VOCABULARY).double())


CASES = {
    "mean": (Words, shifted, {}),
    "tied": (lambda: Words(is_tied=True), shifted, {}),
    "without bias": (lambda: Words(has_bias=False), shifted, {}),
    "ignored targets": (Words, ignoring, {}),
    "sum": (Words, mean_over_ranks_of_tokens, {}),
    "smoothed": (Words, lambda *args: shifted(*args, label_smoothing=0.1), {}),
    "weighted": (Words, lambda *args: shifted(*args, weight=torch.arange(1.0, 1.0 + VOCABULARY).double()), {}),
    "smoothed and weighted": (
        Words,
        lambda *args: shifted(*args, label_smoothing=0.1, weight=torch.arange(1.0, 1.0 + VOCABULARY).double()),
        {},
    ),
    "by position": (Words, by_position, {}),
    "probabilities": (Words, of_probabilities, {}),
    "llama": (Llama, shifted, {}),
    "llama, shards of the sequence": (Llama, shifted, {"sequence_parallel": True}),
}


def logits_of(output):
    return output if torch.is_tensor(output) else output.logits


def compare(name, mesh):
    make, loss_of, options = CASES[name]
    torch.manual_seed(1)
    module = make().double()
    tokens = torch.randint(0, VOCABULARY, (3, 6))
    plan = find_plan(module, loss_parallel=True, **options)
    plan.validate(module, 2)
    whole = copy.deepcopy(module)
    check = BlockCheck(module, plan, mesh)
    cut_module(module, plan, mesh)
    with check.during(is_training=True), loss_context():
        logits = logits_of(module(tokens))
        loss = loss_of(logits, tokens)
        best = logits.argmax(-1)
    loss.backward()
    expected = loss_of(logits_of(whole(tokens)), tokens)
    expected.backward()
    differences = {"loss": float((loss - expected).detach().abs())}
    for key, parameter in whole.named_parameters():
        gradient = module.get_parameter(key).grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        differences[key] = float((gradient - parameter.grad).abs().max())
    is_plain = type(loss) is torch.Tensor and torch.equal(best, logits_of(whole(tokens)).argmax(-1))
    return check.is_complete, is_plain, tuple(logits.to_local().shape), differences


def run_all():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    outcomes = {}
    for name in CASES:
        try:
            outcomes[name] = compare(name, mesh)
        except Exception as error:  # noqa: BLE001 one case does not hide the others
            outcomes[name] = error
    return outcomes


@pytest.fixture(scope="module")
def outcomes():
    return run_ranks(run_all, 2, timeout=480)


@pytest.mark.parametrize("name", CASES)
def test_cut_logits_give_the_loss_and_gradients_of_whole_ones(outcomes, name):
    size = VOCABULARY if CASES[name][0] is not Llama else 12
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome[name], Exception):
            raise outcome[name]
        is_complete, is_plain, shape, differences = outcome[name]
        assert is_complete
        assert is_plain
        assert shape == (3, 6, 6 if rank == 0 else size - 6)
        assert {key: value for key, value in differences.items() if not value <= 1e-12} == {}


def test_a_module_without_a_head_is_refused():
    module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    with pytest.raises(ConfigError, match=r"0 were found in Sequential \(none\); name it: tp_plan="):
        find_plan(module, loss_parallel=True)
