"""Batches are cut along their sequences; a module that needs whole sequences is refused in the first step."""

from typing import NamedTuple

import pytest
import torch
from small import raises
from torch import nn
from torch.nn import functional as F

from echelon import Loss
from echelon.common.errors import ConfigError, DataError, EchelonError, ModuleError
from echelon.strategies.context_parallel.check import check_step
from echelon.strategies.context_parallel.context import ContextParallel, check_exchange
from echelon.strategies.context_parallel.part_lengths import PartLengths
from echelon.strategies.context_parallel.sequence import SequenceLayout
from echelon.strategies.distributed.collectives import Collectives
from echelon.testing import run_ranks


def context(rank=0, size=2, group=None, exchange="allgather", sequence_dim=1):
    return ContextParallel(group, size, rank, exchange=exchange, sequence_dim=sequence_dim)


class Batch(NamedTuple):
    tokens: torch.Tensor
    label: torch.Tensor
    name: str


# --- cutting ----------------------------------------------------------------------------------------------------------


def test_tensors_with_a_sequence_are_cut_and_all_else_is_kept():
    batch = Batch(torch.arange(16).reshape(2, 8), torch.tensor([0, 1]), "a")
    parts = [context(rank).cut(batch, nn.Module()) for rank in range(2)]
    assert parts[0].tokens[0].tolist() == [0, 1, 6, 7]
    assert parts[1].tokens[0].tolist() == [2, 3, 4, 5]
    assert all(part.label is batch.label and part.name == "a" for part in parts)


def test_a_hook_names_the_dimensions():
    class Encoder(nn.Module):
        def sequence_dims(self, batch):
            return {"frames": 0, "mask": None}

    batch = {"frames": torch.arange(4)[:, None], "mask": torch.ones(3, 5)}
    part = context(exchange="ulysses").cut(batch, Encoder())
    assert part["frames"].tolist() == [[0], [1]]
    assert part["mask"] is batch["mask"]


def test_positions_are_those_of_the_part_only_inside_of_a_step_on_it():
    parallel = context(rank=1)
    parallel.cut(torch.zeros(1, 8), nn.Module())
    assert parallel.positions(4, torch.device("cpu")).tolist() == [0, 1, 2, 3]
    with parallel.attention():
        assert parallel.positions(4, torch.device("cpu")).tolist() == [2, 3, 4, 5]
        with pytest.raises(ModuleError, match="4 tokens, got 5 tokens"):
            parallel.positions(5, torch.device("cpu"))


@pytest.mark.parametrize("exchange", ["allgather", "ulysses"])
@pytest.mark.parametrize("length", [4, 7, 30, 31, 64])
def test_parts_of_any_length_differ_by_one_token_at_most_and_their_shares_add_up(length, exchange):
    for size in (2, 4):
        ranks = [context(rank, size, exchange=exchange) for rank in range(size)]
        parts = [rank.sequence_cut.positions(length).tolist() for rank in ranks]
        assert sorted(place for part in parts for place in part) == list(range(length))
        assert max(map(len, parts)) - min(map(len, parts)) == (length % size > 0)
        shares = [rank.share([length, length]) for rank in ranks]
        assert sum(shares) == pytest.approx(size)
        if length < 2 * size:
            assert shares == [size, *[0.0] * (size - 1)]  # the first rank computes all of them
        else:
            assert shares == [size * len(part) / length for part in parts]
        assert (ranks[0].share([64, length]) is None) == (length % size > 0 and length >= 2 * size)


def test_sequences_of_nearly_the_same_length_are_told_apart_by_asking_the_other_ranks():
    cut, asked = SequenceLayout(2, 0, num_chunks=2), []
    lengths = PartLengths(cut, lambda part: asked.append(part) or 7)
    lengths.begin([7, 16])
    assert (lengths.whole(3), lengths.whole(8), asked) == (7, 16, [])
    lengths.begin([6, 7])
    assert [cut.part_length(length) for length in (6, 7)] == [3, 3]
    assert (lengths.whole(3), asked) == (7, [3])
    other = PartLengths(SequenceLayout(2, 1, num_chunks=2), lambda part: asked.append(part) or 7)
    other.begin([6, 7])
    assert (other.whole(4), asked) == (7, [3, 4])  # which knows, but the first rank does not
    assert not lengths.known(8)


class Misnamed(nn.Module):
    def sequence_dims(self, batch):
        return {"token": 1}


@pytest.mark.parametrize(
    ("batch", "module", "error", "text"),
    [
        ([torch.zeros(2, 8), torch.zeros(2, 6)], nn.Module(), DataError, r"batch\[0\]: 8, batch\[1\]: 6"),
        (torch.zeros(8), nn.Module(), DataError, r"a sequence in dimension 1, got shapes \{'': \(8,\)\}"),
        ({"tokens": torch.zeros(2, 8)}, Misnamed(), ConfigError, r"each of \['tokens'\], got \{'token': 1\}"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(batch, module, error, text):
    with pytest.raises(error, match=text):
        context().cut(batch, module)


@pytest.mark.parametrize(
    ("exchange", "num_chunks", "words"),
    [
        ("ulises", 2, ["Did you mean 'ulysses'"]),
        ("allgather", 3, ["cp_chunks must be an even number", "got 3"]),
        ("allgather", 0, ["cp_chunks must be an even number", "got 0"]),
        ("allgather", "4", ["cp_chunks must be an even number", "got '4'"]),
        ("ulysses", 4, ["cp_chunks=4", "cp_exchange='ulysses' divides heads", "use cp_exchange='allgather'"]),
    ],
)
def test_an_impossible_exchange_is_refused(exchange, num_chunks, words):
    with raises(ConfigError, *words):
        check_exchange(exchange, num_chunks)


# --- the first step ---------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """A causal model of two layers; subclasses depart from what can be cut."""

    def __init__(self):
        super().__init__()
        self.parallel = None
        self.num_calls, self.seen = 0, []
        self.register_buffer("calls", torch.zeros(()))
        self.tokens, self.places = nn.Embedding(32, 8), nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 32)

    def positions(self, length):
        return self.parallel.positions(length, torch.device("cpu"))

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(self.positions(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)

    def loss(self, logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def training_step(self, batch):
        tokens, targets = batch
        self.num_calls += 1
        self.calls += 1
        self.seen.append(torch.rand(()).item())
        self.log("loss", 0.0)
        return self.loss(self(tokens), targets)

    def log(self, name, value):
        raise AssertionError("the check must not log")


class OwnPositions(Model):
    def positions(self, length):
        return torch.arange(length)


class Pooled(Model):
    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits + self.head(self.tokens(tokens).mean(1, keepdim=True))


class Shifted(Model):
    def loss(self, logits, targets):
        return super().loss(logits[:, :-1], targets[:, 1:])


class MeanOfSome(Model):
    def loss(self, logits, targets):
        chosen = targets > 20
        return super().loss(logits[chosen][None], targets[chosen])


class MeanOfSomeByHand(MeanOfSome):
    automatic_optimization = False


class CountOfSome(Model):
    def loss(self, logits, targets):
        chosen = targets > 20
        return Loss(F.cross_entropy(logits[chosen], targets[chosen], reduction="sum"), chosen.sum())


class NotCausal(Model):
    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(self.positions(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def check_models(exchange):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    answers = {}
    for kind in (Model, NotCausal, CountOfSome, OwnPositions, Pooled, Shifted, MeanOfSome, MeanOfSomeByHand):
        torch.manual_seed(3)
        module = kind()
        module.parallel = context(rank, exchange=exchange)
        collectives = OverDefaultGroup(rank)
        batch = torch.randint(32, (2, 8)), torch.randint(32, (2, 8))
        drawn = torch.get_rng_state()
        seen = module.seen
        try:
            check_step(module.parallel, module, (batch,), module.training_step, collectives, set())
            answers[kind.__name__] = "passes"
        except EchelonError as error:
            answers[kind.__name__] = str(error)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert module.training and all(layer.training for layer in module.layers)
        assert module.num_calls == 0 and module.calls == 0 and module.seen is seen and not seen
    return answers


class OverDefaultGroup(Collectives):
    """Collectives over torch's default group, without a group of ours."""

    def __init__(self, rank):
        super().__init__(None, torch.device("cpu"))
        self.rank, self.world_size = rank, 2

    def all_reduce(self, data, op="sum"):
        torch.distributed.all_reduce(data)
        return data

    def all_gather_object(self, data):
        objects = [None] * self.world_size
        torch.distributed.all_gather_object(objects, data)
        return objects


@pytest.mark.parametrize("exchange", ["allgather", "ulysses"])
def test_a_module_that_computes_something_else_from_parts_is_refused_by_name(exchange):
    expected = {
        "Model": "passes",
        "NotCausal": "passes",
        "CountOfSome": "passes",
        "OwnPositions": "the first output that differs is that of places",
        "Pooled": "the first output that differs is that of head",
        "Shifted": "from the whole sequences",
        "MeanOfSome": "passes",  # the step weighs it by its targets
        "MeanOfSomeByHand": "from the whole sequences",
    }
    for answers in run_ranks(check_models, 2, exchange):
        for name, text in expected.items():
            assert text in answers[name], (name, answers[name])
