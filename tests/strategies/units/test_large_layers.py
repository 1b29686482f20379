"""Embedding and head are gathered for their calls, unless a step reads them otherwise, and give the same numbers."""

import os
import warnings

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from sweep import IS_SWEEP
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from echelon import ActivationCheckpointing, TrainModule, seed_everything
from echelon.strategies.fsdp import FSDPStrategy
from echelon.strategies.parallel.sharding_policy import large_layers
from echelon.testing import run_ranks

WORDS, WIDTH = 37, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Words(TrainModule):
    """A language model; what its steps do with the head is a subclass's."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.whole = []

    def encode(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            self.look()
            x = block(x)
        return self.norm(x)

    def look(self):
        """Note which of the two are whole now; without a call, that might be seen as a use."""
        held = [vars(layer)["_parameters"] for layer in (self.embed, self.head)]
        self.whole.append(tuple(not isinstance(dict.get(own, "weight"), DTensor) for own in held))

    def logits(self, x):
        return self.head(x)

    def loss(self, batch):
        return nn.functional.cross_entropy(self.logits(self.encode(batch[0])).flatten(0, 1), batch[0].flatten())

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class ReadsTheHead(Words):
    def logits(self, x):
        return nn.functional.linear(x, self.head.weight, self.head.bias)


class TiedByUse(Words):
    """Calls the embedding, and multiplies with its weight."""

    def logits(self, x):
        return self.head(x) + x @ self.embed.weight.T


class ReadsInValidation(Words):
    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch) + self.head.weight.square().sum())


class ReadsOnOneRank(Words):
    def logits(self, x):
        if os.environ.get("RANK") == "1":
            assert self.head.weight.ndim == 2
        return self.head(x)


class AsksForTheDtype(Words):
    def encode(self, tokens):
        assert next(self.parameters()).dtype == torch.float64
        return super().encode(tokens)


class Positions(nn.Embedding):
    def forward(self, tokens):
        return self.weight[: tokens.shape[1]]


class HandsOutItsWeight(Words):
    def __init__(self):
        super().__init__()
        self.places = Positions(30, WIDTH)

    def encode(self, tokens):
        positions = self.places(tokens)
        return super().encode(tokens) * positions + positions


class Chunked(Words):
    """The head is called for each sample, and once more in backward."""

    def logits(self, x):
        return torch.cat([torch.utils.checkpoint.checkpoint(self.head, row, use_reentrant=False) for row in x[:, None]])


class ComputesTheEmbeddingAgain(Words):
    """The embedding is in what a step recomputes, and so is the first block."""

    def encode(self, tokens):
        def stem(tokens):
            return self.blocks[0](self.embed(tokens))

        def stem_alone(tokens):
            return self.embed(tokens) * 2

        x = torch.utils.checkpoint.checkpoint(stem, tokens, use_reentrant=False)
        x = x + torch.utils.checkpoint.checkpoint(stem_alone, tokens, use_reentrant=False)
        return self.norm(self.blocks[2](self.blocks[1](x)))


class Viewed(nn.Linear):
    def forward(self, x):
        return super().forward(x).unflatten(-1, (-1,))


class ChangesAViewInPlace(Words):
    """The head returns a view, which the step then changes."""

    def __init__(self):
        super().__init__()
        self.head = Viewed(WIDTH, WORDS)

    def logits(self, x):
        return self.head(x).mul_(0.5)


class TiedInPlace(Words):
    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class TiedBlocks(Words):
    """Two of three blocks share a weight, so that only the other one is a unit, and has another class."""

    def __init__(self):
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


KINDS = {
    Words: {"training_step": [True, True], "validation_step": [True, True]},
    ReadsTheHead: {"training_step": [True, False], "validation_step": [True, False]},
    TiedByUse: {"training_step": [False, True], "validation_step": [False, True]},
    ReadsInValidation: {"training_step": [True, True], "validation_step": [True, False]},
    ReadsOnOneRank: {"training_step": [True, False], "validation_step": [True, False]},
    AsksForTheDtype: {"training_step": [False, True], "validation_step": [False, True]},
    HandsOutItsWeight: {"training_step": [True, True, False], "validation_step": [True, True, False]},
    Chunked: {"training_step": [True, True], "validation_step": [True, True]},
    ComputesTheEmbeddingAgain: {"training_step": [True, True], "validation_step": [True, True]},
    ChangesAViewInPlace: {"training_step": [True, True], "validation_step": [True, True]},
    TiedInPlace: None,
    TiedBlocks: {"training_step": [True, True], "validation_step": [True, True]},
}


def data():
    tokens = torch.randint(0, WORDS, (16, 5), generator=torch.Generator().manual_seed(1))
    return TensorDataset(tokens)


def fit(kind, **settings):
    seed_everything(3, verbose=False)
    module = kind()
    trainer = double_trainer(**{"max_epochs": 1, **settings})
    trainer.fit(module, DataLoader(data(), 8 // world_size()), DataLoader(data(), 8 // world_size()))
    weights = {name: whole(value).clone() for name, value in module.state_dict().items()}
    return module, trainer, weights


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def active_of(trainer):
    layers = trainer.strategy.placed._sharded.runs.layers
    return None if layers is None else layers._active


def train_each():
    calm_down()
    warnings.filterwarnings("error", message="FSDP2-wrapped module")
    found = {}
    for kind in KINDS:
        module, trainer, weights = fit(kind, strategy=FSDPStrategy())
        found[kind.__name__] = weights, active_of(trainer), module.whole, trainer.callback_metrics["val"].item()
    return found


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(train_each, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_each_way_to_use_them_ends_like_one_process(ranks, kind):
    _, trainer, expected = fit(kind)
    for rank in ranks:
        weights, active, _, val = rank[kind.__name__]
        assert active == KINDS[kind]
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-12)
        assert val == pytest.approx(trainer.callback_metrics["val"].item(), abs=1e-12)


def test_they_are_whole_in_the_first_step_and_afterwards_only_when_they_compute(ranks):
    first = 2 * 3  # the blocks of the first validation step and of the first training step
    for rank in ranks:
        whole_ones = rank["Words"][2]
        assert set(whole_ones[:first]) == {(True, True)}
        assert set(whole_ones[first:]) == {(False, False)}
        assert set(rank["ReadsTheHead"][2][first:]) == {(False, True)}


# --- with other settings ---------------------------------------------------------------------------------------------


def is_repeated(name, submodule):
    return name == "head" or isinstance(submodule, Block)


SETTINGS = {
    "replicas": ({"replicate": 2}, {}),
    "kept after forward": ({"reshard_after_forward": False}, {}),
    "prefetched": ({"forward_prefetch": 2, "backward_prefetch": 2}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "accumulated, reduced each time": ({"sync_each_micro_batch": True}, {"accumulate_grad_batches": 2}),
    "offloaded": ({"cpu_offload": True}, {}),
    "clipped": ({}, {"gradient_clip_val": 0.1}),
    "computed again": ({}, {"activation_checkpointing": ActivationCheckpointing(modules=is_repeated)}),
    "kept on the CPU": ({}, {"activation_checkpointing": ActivationCheckpointing(offload=True)}),
}
IN_A_SWEEP = ("clipped", "accumulated", "offloaded", "kept on the CPU")
SETTINGS = {name: settings for name, settings in SETTINGS.items() if IS_SWEEP or name not in IN_A_SWEEP}
PRECISIONS = ("bf16-mixed", "bf16-true") if IS_SWEEP else ("bf16-mixed",)


class BuiltLate(TrainModule):
    training_step, validation_step, configure_optimizers = (
        Words.training_step,
        Words.validation_step,
        Words.configure_optimizers,
    )
    encode, look, logits, loss = Words.encode, Words.look, Words.logits, Words.loss

    def configure_model(self):
        if hasattr(self, "embed"):
            return
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.whole = nn.LayerNorm(WIDTH), []


def train_with_settings():
    calm_down()
    found = {}
    for name, (options, settings) in SETTINGS.items():
        _, trainer, weights = fit(Words, strategy=FSDPStrategy(**options), **settings)
        assert active_of(trainer)["training_step"] == [True, True]
        found[name] = weights
    _, trainer, weights = fit(BuiltLate, strategy=FSDPStrategy(deferred_init=True))
    assert active_of(trainer)["training_step"] == [True, True]
    found["built late"] = weights
    for policy in (None, Block):
        for precision in PRECISIONS:
            _, trainer, weights = fit(Words, strategy=FSDPStrategy(policy=policy), precision=precision)
            assert (active_of(trainer) is None) == (policy is not None)
            found[policy, precision] = weights
    return found


@pytest.mark.only_in_sweep  # each way to use them has the defaults
@pytest.mark.sweep
def test_settings_keep_the_numbers():
    alike = {name: fit(Words, **settings)[2] for name, (_, settings) in SETTINGS.items()}
    alike["built late"] = fit(BuiltLate)[2]
    for rank in run_ranks(train_with_settings, 2):
        for name, expected in alike.items():
            torch.testing.assert_close(rank[name], expected, rtol=0, atol=1e-12, msg=name)
        for precision in PRECISIONS:
            torch.testing.assert_close(rank[None, precision], rank[Block, precision], rtol=0, atol=0)


# --- which layers ----------------------------------------------------------------------------------------------------


def test_layers_half_as_large_as_a_block_are_large():
    module = Words()
    assert large_layers(module) == ["embed", "head"]
    module.head = nn.Linear(WIDTH, 4)
    module.inner = nn.Sequential(nn.Linear(WIDTH, WORDS), nn.ReLU())
    module.blocks.append(nn.ModuleDict({"other": nn.Linear(90, 90)}))
    assert large_layers(module) == ["embed", "blocks.3.other", "inner.0"]
    assert large_layers(TiedInPlace()) == []
    del module.blocks
    assert large_layers(module) == []
