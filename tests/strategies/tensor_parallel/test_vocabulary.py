"""Where no plan names them, the table of tokens and the head are cut if they are found, and only called as layers."""

import pytest
import torch
from torch import nn

from echelon.strategies.tensor_parallel.find_plan import find_plan


class Language(nn.Module):
    """Blocks between a table and a head."""

    def __init__(self, tokens=100, *, is_tied=False):
        super().__init__()
        self.table, self.places = nn.Embedding(tokens, 16), nn.Embedding(64, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)))
        self.head = nn.Linear(16, tokens)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(self.blocks(self.table(tokens) + self.places(torch.arange(tokens.shape[1]))))


class Scaled(Language):
    """Reads the weight of its head, which is more than its layer does."""

    def forward(self, tokens):
        return super().forward(tokens) / self.head.weight.norm()


class Named(Language):
    """Names the weight in a text, which reads nothing."""

    _tied_weights_keys = ("head.weight",)

    def forward(self, tokens):
        """Call head.weight in words only."""
        return super().forward(tokens)


class Shared(Language):
    """Has the bias of the head beside it, as BERT's has."""

    def __init__(self):
        super().__init__()
        self.bias = self.head.bias


def two_heads():
    model = Language()
    model.other = nn.Linear(16, 100)
    return model


def sparse():
    model = Language()
    model.table = nn.Embedding(100, 16, sparse=True)
    return model


def words_of(model):
    words = find_plan(nn.ModuleDict({"model": model})).words
    assert any("blocks" in name for name in words)
    return {name.removeprefix("model."): word for name, word in words.items() if "blocks" not in name}


@pytest.mark.parametrize("make", [Language, lambda: Language(is_tied=True), Named, lambda: Language(65)])
def test_a_table_and_a_head_are_cut(make):
    assert words_of(make()) == {"table": "embedding_rowwise", "head": "colwise_gather_output"}


@pytest.mark.parametrize("make", [Scaled, Shared, two_heads, sparse, lambda: Language(63)])
def test_what_other_code_reads_or_has_too_and_small_ones_are_left_whole(make):
    assert words_of(make()) == {}


def test_the_layers_of_a_module_itself_are_left_alone():
    assert set(find_plan(Language()).words) == {f"blocks.{at}.{own}" for at in (0, 1) for own in (0, 2)}
