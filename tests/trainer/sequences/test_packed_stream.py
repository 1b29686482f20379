"""Streams of documents are packed as they come: no token is lost or comes twice, on any ranks, and after a resume."""

import itertools

import pytest
import stopped_reading
from small import raises
from stateful_stream import WithState
from stopped_reading import steps_of, train_data
from torch.utils.data import DataLoader, IterableDataset

from echelon import ConfigError, DataError, PackedDataset
from echelon.trainer.data.index_stream import DataRanks

SEQ_LEN = 16
METHODS = ["concatenate", "first-fit", "best-fit-decreasing"]
TEXTS = [list(range(100 * number + 1, 100 * number + 2 + (number * 7) % 23)) for number in range(60)]
TOKENS = sorted(itertools.chain(*TEXTS))


class Texts(IterableDataset):
    """The documents in order."""

    def __init__(self, texts=TEXTS):
        self.texts = texts

    def __iter__(self):
        return iter(self.texts)


class Resumable(WithState, Texts):
    """The same with a state; it counts what it reads."""


class Shards(Resumable):
    """The same in shards."""

    num_shards = 4

    def shard(self, num_shards, index):
        return Resumable(self.texts[index::num_shards])


def packs_of(kind, method):
    return PackedDataset(kind(), SEQ_LEN, method=method, buffer=8)


def tokens_of(packs):
    return [token for pack in packs for token in pack["input_ids"][pack["document_ids"] >= 0].tolist()]


@pytest.mark.parametrize("method", METHODS)
def test_every_token_comes_once(method):
    packs = list(packs_of(Texts, method))
    assert sorted(tokens_of(packs)) == TOKENS
    assert len(packs) < 1.4 * len(TOKENS) / SEQ_LEN
    whole = list(PackedDataset(TEXTS[:8], SEQ_LEN, method=method, shuffle=False, buffer=8))
    for pack, expected in zip(packs, whole, strict=False):
        assert {name: value.tolist() for name, value in pack.items()} == {
            name: value.tolist() for name, value in expected.items()
        }


def loader_of(packs, workers=0):
    return DataLoader(packs, 2, num_workers=workers, collate_fn=PackedDataset.collate)


def tokens_in(batch):
    return batch["input_ids"][batch["document_ids"] >= 0].tolist()


def read(kind, method, before, after=None, stop=None):
    return stopped_reading.read(
        lambda workers: loader_of(packs_of(kind, method), workers), before, after, stop, samples_of=tokens_in
    )


@pytest.mark.filterwarnings("ignore:PackedStream is dealt batch by batch", "ignore:DataLoader cannot skip")
@pytest.mark.parametrize("kind", [Texts, Resumable])
@pytest.mark.parametrize(("before", "after"), [((2, 0), (1, 0)), ((1, 2), (3, 0))])
def test_packs_go_on_in_order_on_other_ranks_and_workers(kind, before, after):
    for method, stop in zip(METHODS, (1, 4, 7), strict=True):
        assert read(kind, method, before, after, stop) == tokens_of(packs_of(kind, method))


@pytest.mark.parametrize(("before", "after"), [((2, 0), (1, 0)), ((1, 2), (1, 2))])
def test_shards_are_packed_by_themselves(before, after):
    found = read(Shards, "best-fit-decreasing", before, after, 3)
    assert sorted(found) == TOKENS
    assert before != after or found == read(Shards, "best-fit-decreasing", before)


def test_a_state_is_that_of_the_group():
    data = train_data(loader_of(packs_of(Resumable, "best-fit-decreasing")), DataRanks())
    data.begin_epoch(0)
    steps_of(data, 0, 15, tokens_in)
    stream = Resumable()
    again = train_data(loader_of(PackedDataset(stream, SEQ_LEN, buffer=8)), DataRanks())
    steps_of(again, again.resume_epoch(0, data.state_dict(), 15), None, tokens_in)
    assert 0 < stream.reads < len(TEXTS) - 16


def test_mistakes_are_named():
    with raises(DataError, "at least one token", "got 0 and 0 for document 1 of the stream"):
        list(PackedDataset(Texts([[1, 2], [], [3]]), 4))
    with raises(ConfigError, "seq_len must be at least 1, got seq_len=0"):
        PackedDataset(Texts(), 0)
    with raises(ConfigError, "lengths must be None for a stream"):
        PackedDataset(Texts(), 4, lengths=[1])
    with raises(ConfigError, "method must be one of"):
        PackedDataset(Texts(), 4, method="best")
    assert not hasattr(PackedDataset(Texts(), 4), "state_dict")
