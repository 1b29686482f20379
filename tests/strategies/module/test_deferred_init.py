"""A module built without memory gets the same values, bit by bit, as one built in place."""

import pytest
import torch
from torch import nn

from echelon.common.errors import ModuleError
from echelon.strategies.module.deferred_init import DeferredInit


def lstm():
    return nn.LSTM(6, 5)


def attention():
    return nn.TransformerEncoderLayer(6, 2, 7)


def initialised_twice():
    module = nn.Sequential(nn.Linear(3, 4), nn.Conv1d(2, 3, 2), nn.Embedding(5, 4, padding_idx=1))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    nn.init.xavier_uniform_(module[0].weight)
    return module


def truncated():
    module = nn.Linear(30, 20)
    nn.init.trunc_normal_(module.weight, std=2.0)
    return module


def orthogonal():
    module = nn.Linear(4, 8)
    nn.init.orthogonal_(module.weight)
    return module


def changed_in_parts():
    module = nn.Linear(4, 8)
    with torch.no_grad():
        module.weight[:2].mul_(3)
        module.weight[2:4].uniform_(-1, 1)
        module.bias.copy_(module.weight[:, 0])
    return module


def chosen_by_lists():
    module = nn.Embedding(6, 3)
    module.rows = nn.Parameter(module.weight[[4, 1]].detach().clone())
    with torch.no_grad():
        module.weight[[0, 5]] = module.weight[[True, False, False, True, False, False]]
    return module


def computed():
    module = nn.BatchNorm1d(3)
    module.position = nn.Parameter(torch.randn(5, 6) * 0.02)
    module.register_buffer("data", torch.tensor([1.0, 2.0, 3.0]))
    module.register_buffer("mask", torch.tril(torch.ones(4, 4)))
    module.register_buffer("powers", torch.arange(5).float().pow(2), persistent=False)
    return module


def trunc_normal_by_an_older_name(init=nn.init.trunc_normal_):
    module = nn.Linear(30, 20)
    init(module.weight, std=2.0)
    return module


def initialised_unless_deferred():
    """As transformers 5 does: nothing is initialized where tensors are on the meta device."""
    module = nn.Linear(3, 4)
    if torch.tensor([]).device.type != "meta" and module.weight.device != torch.device("meta"):
        nn.init.normal_(module.weight)
        module.bias.data = torch.rand(4, device=module.weight.device)
    return module


def on_the_device_of_another_layer():
    module = nn.Sequential(nn.Linear(3, 4))
    module.append(nn.Linear(4, 2, device=module[0].weight.device))
    module.append(nn.Linear(2, 2).to(module[0].weight.device))
    module.noise = nn.Parameter(module[0].weight + torch.randn(4, 3, device=module[0].weight.device))
    return module


def tied():
    module = nn.ModuleDict({"embed": nn.Embedding(7, 3), "head": nn.Linear(3, 7)})
    module["head"].weight = module["embed"].weight
    return module


def named(module):
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def replayed(build):
    """Return an initialisation, the module, and the values made later."""
    torch.manual_seed(1)
    deferred = DeferredInit()
    with deferred.recording():
        module = build()
    values = {}
    deferred.replay(deferred.places(module), lambda name, value: values.update({name: value}))
    return module, values


@pytest.mark.parametrize(
    "build",
    [
        lstm,
        attention,
        initialised_twice,
        initialised_unless_deferred,
        on_the_device_of_another_layer,
        truncated,
        trunc_normal_by_an_older_name,
        orthogonal,
        changed_in_parts,
        chosen_by_lists,
        computed,
        tied,
    ],
    ids=lambda build: build.__name__,
)
def test_values_made_later_are_those_of_building_in_place(build):
    torch.manual_seed(1)
    expected, generator = dict(named(build())), torch.get_rng_state()
    module, values = replayed(build)
    assert all(tensor.is_meta for _, tensor in named(module))
    assert values.keys() == expected.keys()
    for name, value in values.items():
        assert torch.equal(value, expected[name]), name
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.parametrize("name", ["Bert", "GPT2", "Llama", "ViT"])
def test_models_of_transformers_get_the_values_that_they_would_have_had(name):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    if name != "ViT":
        sizes |= {"vocab_size": 11, "bos_token_id": 0, "eos_token_id": 1}
    config = getattr(transformers, f"{name}Config")(**sizes)

    def build():
        return getattr(transformers, f"{name}Model")(config)

    torch.manual_seed(1)
    expected = dict(named(build()))
    _, values = replayed(build)
    assert values.keys() == expected.keys()
    for key, value in values.items():
        assert torch.equal(value, expected[key]), key


def test_what_has_been_drawn_in_between_is_not_drawn_again():
    torch.manual_seed(1)
    deferred = DeferredInit()
    with deferred.recording():
        module = nn.Linear(2, 2)
    torch.rand(3)
    state = torch.get_rng_state()
    deferred.replay(deferred.places(module), lambda name, value: None)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "draw",
    [lambda: torch.manual_seed(3), lambda: torch.tensor([1.0, 2.0], device="cpu").normal_()],
    ids=["a seed", "values that were there"],
)
def test_numbers_drawn_outside_of_the_record_are_refused(draw):
    with pytest.raises(ModuleError, match=r"torch\.manual_seed or.*seed before fit"), DeferredInit().recording():
        draw()


@pytest.mark.parametrize(
    "read",
    [lambda: torch.randn(1).item(), lambda: torch.randn(3).numpy(), lambda: bool(torch.randn(1) > 0)],
    ids=["a number", "an array", "a decision"],
)
def test_values_that_are_read_while_building_are_refused(read):
    with pytest.raises(ModuleError, match="reads values.*build that layer in __init__"), DeferredInit().recording():
        read()


def test_a_meta_device_of_its_own_is_refused():
    refused = pytest.raises(ModuleError, match="device='meta', as from_pretrained.*echelon.load_pretrained")
    with refused, DeferredInit().recording(), torch.device("meta"):
        nn.Linear(2, 2)


def test_another_error_while_building_stays_what_it_is():
    with pytest.raises(RuntimeError, match="must have same reduction dim"), DeferredInit().recording():
        torch.ones(2, 3) @ torch.ones(2, 3)
