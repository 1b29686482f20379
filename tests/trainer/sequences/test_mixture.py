"""A mixture draws from its sources in their shares, each sample before one comes twice, and goes on exactly."""

import itertools
import pickle
from collections import Counter
from functools import partial

import pytest
import torch
from in_step import on_ranks
from recording_logger import RecordingLogger
from small import Regression, quiet, raises, samples
from stateful_stream import WithState
from stopped_reading import read, steps_of, train_data
from sweep import dealt
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from echelon import ConfigError, DataError, KeyedSampler, Mixture, PackedDataset, SampleLedger
from echelon.callbacks.samples.audit import audit_ledger
from echelon.trainer.data.index_stream import DataRanks
from echelon.trainer.sequences.interleaving import Interleaving, keys_of

A, B = list(range(100)), list(range(1000, 1030))


class Numbers(IterableDataset):
    """A stream of numbers, in another order in each pass if it is told."""

    def __init__(self, start, stop):
        self.start, self.stop = start, stop

    def __iter__(self):
        yield from range(self.start, self.stop)


class Resumable(WithState, Numbers):
    """The same with a state; it counts what it reads."""


class Staged(Dataset):
    """Samples that tell the epoch of their data set."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self.epoch * 100 + index


def epoch_of(mixture, epoch):
    mixture.set_epoch(epoch)
    return [mixture[index] for index in range(len(mixture))]


def test_shares_are_exact_in_every_stretch():
    order = Interleaving([(0, [5, 3, 2])], keys_of(["a", "b", "c"], 1))
    drawn = [source for source, _ in itertools.islice(order.draws(0), 10_000)]
    for start in range(0, 9000, 250):
        counts = Counter(drawn[start : start + 1000])
        assert all(abs(counts[source] - share) <= 3 for source, share in enumerate([500, 300, 200]))
    assert drawn != [source for source, _ in itertools.islice(order.draws(1), 10_000)]


def test_the_order_is_known_at_any_position():
    order = Interleaving([(0, [0.7, 0.2, 0.1]), (500, [0, 1, 1]), (3000, [1, 1, 0])], keys_of(["a", "b", "c"], 1))
    drawn = list(itertools.islice(order.draws(0), 5000))
    for position in (0, 1, 499, 500, 501, 1023, 1024, 2999, 3000, 4990):
        assert order.counts(position) == [sum(source == each for source, _ in drawn[:position]) for each in range(3)]
        assert list(itertools.islice(order.draws(position), 5)) == drawn[position : position + 5]
    for source in range(3):
        numbers = [number for each, number in drawn if each == source]
        assert numbers == list(range(len(numbers)))
    assert order.end_of(1, 40, 10**6) == drawn.index((1, 40)) + 1
    assert order.end_of(2, 10**5, 10**6) is None  # the last weight is 0
    far = 10**12
    assert abs(order.counts(far)[0] - order.counts(far)[1]) < 5000


def test_each_source_goes_through_all_its_samples_before_one_comes_twice():
    mixture = Mixture({"a": (A, 0.6), "b": (B, 0.4)}, stop="all_exhausted")
    read = list(itertools.chain(*(epoch_of(mixture, epoch) for epoch in range(4))))
    for source in (A, B):
        own = [sample for sample in read if sample in set(source)]
        passes = [own[start : start + len(source)] for start in range(0, len(own), len(source))]
        assert len(passes) > 3
        assert all(sorted(each) == source for each in passes[:-1])
        assert passes[0] != passes[1] != source


def test_what_ends_an_epoch_has_a_name():
    def length(stop):
        mixture = Mixture({"a": (A, 0.6), "b": (B, 0.4)}, stop=stop)
        return len(mixture), Counter("a" if sample < 1000 else "b" for sample in epoch_of(mixture, 0)), mixture

    num, counts, mixture = length("first_exhausted")
    assert counts["b"] == 30 and mixture.draw(num - 1).source == "b" and num < 80
    num, counts, mixture = length("all_exhausted")
    assert counts["a"] == 100 and mixture.draw(num - 1).source == "a" and 160 < num < 170
    assert length(77)[0] == 77


def test_weights_follow_sizes_and_temperature_and_tokens():
    def shares(mixture):
        counts = Counter(mixture.draw(index).source for index in range(len(mixture)))
        return {name: count / len(mixture) for name, count in counts.items()}

    def near(mixture, expected):
        return all(abs(share - expected) < 0.01 for share in [shares(mixture)["a"]])

    assert near(Mixture({"a": A, "b": B}, stop=1000), 100 / 130)
    assert near(Mixture({"a": A, "b": B}, stop=1000, temperature=2), 10 / (10 + 30**0.5))
    assert near(Mixture({"a": (A, 1), "b": (B, 3)}, stop=1000), 0.25)
    long, short = [[0] * 40] * 50, [[0] * 10] * 50
    by_tokens = Mixture({"a": (long, 1), "b": (short, 1)}, stop=1000, by="tokens")
    assert near(by_tokens, 0.2)
    assert abs(by_tokens.progress(1000)["mixture/a/tokens"] - by_tokens.progress(1000)["mixture/b/tokens"]) <= 80
    given = Mixture({"a": (A, 1), "b": (B, 1)}, stop=1000, by="tokens", lengths={"a": 4.0, "b": [1] * 30})
    assert near(given, 0.2)


def test_weights_change_with_the_position():
    schedule = [(0, {"a": 1, "b": 0}), (200, {"a": 1, "b": 1}), (400, {"a": 0, "b": 1})]
    mixture = Mixture({"a": A, "b": B}, stop=300, schedule=schedule)
    read = epoch_of(mixture, 0) + epoch_of(mixture, 1)
    thirds = [Counter(sample < 1000 for sample in read[start : start + 200]) for start in (0, 200, 400)]
    assert thirds[0][True] == 200 and thirds[2][True] == 0 and abs(thirds[1][True] - 100) <= 2
    moving = Mixture({"a": A, "b": B}, stop=5000, schedule=lambda position: {"a": 1, "b": position / 1000})
    counts = [Counter(moving.draw(index).source for index in range(start, start + 1000)) for start in (0, 4000)]
    assert counts[0]["b"] == 0 and abs(counts[1]["a"] - 220) < 30


def test_tokens_seen_are_those_of_the_samples():
    texts = {
        "a": [[0] * (number % 7 + 1) for number in range(50)],
        "b": [[0] * (number % 5 + 1) for number in range(9)],
    }
    mixture = Mixture({"a": (texts["a"], 1), "b": (texts["b"], 1)}, by="tokens", stop=40)
    for epoch, index in ((0, 0), (0, 13), (0, 40), (3, 5), (1, 17), (7, 39)):
        drawn = [mixture.draw(place % 40, place // 40) for place in range(40 * epoch + index)]
        for name in "ab":
            mine = [texts[name][each.place] for each in drawn if each.source == name]
            assert mixture.progress(index, epoch)[f"mixture/{name}/samples"] == len(mine)
            assert mixture.progress(index, epoch)[f"mixture/{name}/tokens"] == sum(map(len, mine))


def test_sources_are_told_their_own_epoch():
    mixture = Mixture({"a": (Staged(), 1), "b": (A, 1)}, stop=60)
    read = [sample for sample in epoch_of(mixture, 0) if sample not in A or sample // 100]
    told = sorted(sample for sample in read if sample >= 100)
    assert [sample // 100 for sample in told] == [1] * 10 + [2] * 10


def test_a_mixture_of_mixtures_and_a_copy_read_the_same():
    inner = Mixture({"x": (A, 1), "y": (B, 1)}, stop=40)
    mixture = Mixture({"inner": (inner, 1), "c": (list(range(2000, 2100)), 1)}, stop=50)
    assert epoch_of(pickle.loads(pickle.dumps(mixture)), 2) == epoch_of(mixture, 2)


# --- in a Trainer


def mixed():
    return Mixture({"a": (samples(20), 0.7), "b": (samples(7), 0.3)}, stop=24)


def test_the_share_of_each_source_is_logged_and_the_ledger_is_exact(tmp_path):
    logger = RecordingLogger(str(tmp_path))
    trainer = quiet(tmp_path, max_epochs=2, logger=logger, log_every_n_steps=2, callbacks=SampleLedger())
    module, mixture = Regression(), mixed()
    trainer.fit(module, DataLoader(mixture, 4, shuffle=True))
    rows = [row for _, row in logger.records if "mixture/a/samples" in row]
    assert len(rows) == 6
    for number, row in enumerate(rows, 1):
        done = 8 * number
        assert row["mixture/a/samples"] + row["mixture/b/samples"] == done
        assert abs(row["mixture/a/samples"] - 0.7 * done) < 2
    read = [round(10 * float(x)) for batch in module.seen for x in batch[1].flatten()]
    expected = [mixture.draw(place, epoch).place for epoch in (0, 1) for place in range(24)]
    assert read == expected
    assert audit_ledger(next(tmp_path.rglob("samples"))).is_exact


class Streams:
    """Mixtures to be read on several ranks."""

    map_style = staticmethod(lambda: Mixture({"a": (A, 0.7), "b": (B, 0.3)}, stop=61))
    streamed = staticmethod(lambda: Mixture({"a": (A, 0.7), "s": (Numbers(1000, 1008), 0.3)}, stop=61))
    resumable = staticmethod(lambda: Mixture({"a": (A, 0.7), "s": (Resumable(1000, 1008), 0.3)}, stop=61))


def loader_of(make, workers=0):
    return DataLoader(make(), 3, num_workers=workers)


def read_with_a_stop(make, before, after, stop, epoch=1):
    """Return an epoch's samples, of which the first steps are read by other ranks and workers."""
    return read(partial(loader_of, make), before, after, stop, epoch=epoch)


LAYOUTS = [((1, 0), (1, 0)), ((2, 0), (3, 0)), ((1, 2), (2, 2)), ((3, 0), (1, 0))]
LAYOUTS_AND_KINDS = list(itertools.product(LAYOUTS, ["map_style", "streamed", "resumable"]))


@pytest.mark.filterwarnings("ignore:StreamedMixture is dealt batch by batch")
@pytest.mark.sweep
@pytest.mark.parametrize(("case", "stop"), dealt(LAYOUTS_AND_KINDS, [1, 4], [0]))
def test_a_mixture_goes_on_exactly_on_other_ranks_and_workers(case, stop):
    (before, after), kind = case
    make = getattr(Streams, kind)
    mixture = make()
    mixture.set_epoch(1)
    expected = list(mixture) if kind != "map_style" else epoch_of(mixture, 1)
    assert read_with_a_stop(make, before, after, stop) == expected


def test_streams_go_on_from_pass_to_pass_and_epoch_to_epoch():
    mixture = Streams.streamed()
    assert len(mixture) == 61
    read = []
    for epoch in range(3):
        mixture.set_epoch(epoch)
        read += [number for number in mixture if number >= 1000]
    assert read == [1000 + place % 8 for place in range(len(read))] and len(read) > 50


def test_a_stream_with_a_state_is_not_read_again():
    data = train_data(loader_of(Streams.resumable), DataRanks())
    data.begin_epoch(0)
    steps_of(data, 0, 10)
    stream = Resumable(1000, 1008)
    make = lambda: Mixture({"a": (A, 0.7), "s": (stream, 0.3)}, stop=61)  # noqa: E731
    again = train_data(loader_of(make), DataRanks())
    steps, _ = steps_of(again, again.resume_epoch(0, data.state_dict(), 10))
    assert stream.reads == sum(number >= 1000 for step in steps for number in step)


class OfRank(Numbers):
    """A stream that divides itself."""

    def __init__(self, rank, size):
        super().__init__(rank, 40)
        self.size = size

    def __iter__(self):
        yield from range(self.start, self.stop, self.size)


class OfWorker(Numbers):
    """A stream that is divided among workers."""

    def __iter__(self):
        info = get_worker_info()
        yield from range(self.start + (info.id if info else 0), self.stop, info.num_workers if info else 1)


@pytest.mark.filterwarnings("ignore:StreamedMixture is dealt batch by batch")
def test_a_stream_that_divides_itself_by_rank_is_an_error_and_by_worker_none():
    def run(ranks):
        make = lambda: Mixture({"a": (A, 1), "s": (OfRank(ranks.data_rank, ranks.data_size), 1)}, stop=20)  # noqa: E731
        data = train_data(loader_of(make), ranks)
        with raises(DataError, "A stream of StreamedMixture must be the same on all ranks", "it divides itself"):
            data.begin_epoch(0)
            next(data.windows(0))

    def run_with_length(ranks):
        with raises(DataError, "must be the same on all ranks"):
            run(ranks)

    on_ranks(2, run_with_length, DataRanks())
    make = lambda: Mixture({"a": (A, 1), "s": (OfWorker(1000, 1009), 1)}, stop=40)  # noqa: E731
    mixture = make()
    assert read_with_a_stop(make, (2, 2), (2, 2), 2, epoch=0) == list(mixture)


def test_workers_of_a_plain_loop_divide_a_streamed_mixture():
    mixture = Streams.streamed()
    read = torch.cat(list(DataLoader(mixture, 5, num_workers=2))).tolist()
    assert sorted(read) == sorted(mixture) and get_worker_info() is None


# --- mistakes


class Unsized(Dataset):
    def __getitem__(self, index):
        return index


PAIR = {"a": (A, 1), "b": (B, 1)}
UNNAMED = {"a": A, "b": B}
MISTAKES = {
    "no sources": (lambda: Mixture({}), ConfigError, "at least one source"),
    "a list": (lambda: Mixture([A, B]), ConfigError, "takes {name: (data set, weight)}"),
    "zero": (lambda: Mixture({"a": (A, 0)}), ConfigError, "weight of 'a' must be above 0, got 0"),
    "negative": (lambda: Mixture({"a": (A, -1)}), ConfigError, "weight of 'a' must be a number from 0 on, got -1"),
    "nan": (lambda: Mixture({"a": (A, float("nan"))}), ConfigError, "must be a number from 0 on, got nan"),
    "text": (lambda: Mixture({"a": (A, "1")}), ConfigError, "weight of 'a' must be a number from 0 on, got '1'"),
    "some weights": (lambda: Mixture({"a": (A, 1), "b": B}), ConfigError, "got none for b"),
    "a triple": (lambda: Mixture({"a": (A, 1, 2)}), ConfigError, "got a tuple of 3"),
    "empty": (lambda: Mixture({"a": ([], 1)}), DataError, "source 'a' has no samples"),
    "a loader": (lambda: Mixture({"a": (DataLoader(A), 1)}), DataError, "got a DataLoader"),
    "an iterator": (lambda: Mixture({"a": (iter(A), 1)}), DataError, "which can be read once"),
    "a number": (lambda: Mixture({"a": (5, 1)}), DataError, "source 'a' must be a data set, got 5"),
    "no length": (lambda: Mixture({"a": (Unsized(), 1)}), DataError, "Unsized has no length"),
    "stop": (lambda: Mixture(PAIR, stop="first"), ConfigError, "stop must be 'first_exhausted' or 'all_exhausted'"),
    "stop 0": (lambda: Mixture(PAIR, stop=0), ConfigError, "at least 1 sample, got stop=0"),
    "by": (lambda: Mixture(PAIR, by="bytes"), ConfigError, "by must be 'samples' or 'tokens', got 'bytes'"),
    "temperature": (lambda: Mixture(PAIR, temperature=0), ConfigError, "temperature must be above 0, got 0"),
    "two weights": (lambda: Mixture(PAIR, schedule=[(0, {"a": 1, "b": 1})]), ConfigError, "got weights for 2 sources"),
    "no phase": (lambda: Mixture(UNNAMED, schedule=[]), ConfigError, "schedule must be [(from_sample,"),
    "late phase": (lambda: Mixture(UNNAMED, schedule=[(5, {"a": 1, "b": 1})]), ConfigError, "must begin at 0, got 5"),
    "unsorted": (
        lambda: Mixture(UNNAMED, schedule=[(0, {"a": 1, "b": 1}), (9, {"a": 1, "b": 1}), (9, {"a": 1, "b": 1})]),
        ConfigError,
        "schedule[2] must begin after 9, got 9",
    ),
    "unknown": (lambda: Mixture(UNNAMED, schedule=[(0, {"a": 1, "bb": 1})]), ConfigError, "names 'bb'"),
    "missing": (lambda: Mixture(UNNAMED, schedule=[(0, {"a": 1})]), ConfigError, "has no weight for b"),
    "all zero": (lambda: Mixture(UNNAMED, schedule=[(0, {"a": 0, "b": 0})]), ConfigError, "must have a weight above 0"),
    "never": (
        lambda: Mixture(UNNAMED, schedule=[(0, {"a": 1, "b": 1}), (9, {"a": 1, "b": 0})], stop="all_exhausted"),
        ConfigError,
        "never comes: the last weight of 'b'",
    ),
    "endless": (lambda: Mixture(UNNAMED, schedule=lambda _: {"a": 1, "b": 1}), ConfigError, "schedule is a function"),
    "a stream's end": (lambda: Mixture({"a": (Numbers(0, 5), 1)}), ConfigError, "the stream 'a' has no length"),
    "a stream's size": (lambda: Mixture({"a": Numbers(0, 5)}, stop=5), ConfigError, "has no size to weigh it by"),
    "a stream's tokens": (
        lambda: Mixture({"a": (Numbers(0, 5), 1)}, stop=5, by="tokens"),
        DataError,
        "cannot be counted in a stream",
    ),
    "lengths of others": (lambda: Mixture(PAIR, lengths={"c": 1}), ConfigError, "lengths names 'c'"),
    "too few lengths": (lambda: Mixture(PAIR, lengths={"a": [1, 2]}), DataError, "one for each of 100"),
    "a position": (lambda: Mixture(PAIR, stop=5)[5], IndexError, "index must be below 5, got 5"),
    "an empty stream": (lambda: list(Mixture({"a": (Numbers(0, 0), 1)}, stop=5)), DataError, "yields no sample"),
    "packed": (lambda: PackedDataset(Mixture(PAIR), 8), ConfigError, "give each of its sources, and mix the packs"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake):
    make, kind, found = MISTAKES[mistake]
    if kind is IndexError:
        with pytest.raises(IndexError, match=found):
            make()
    else:
        with raises(kind, found):
            make()


def test_packs_of_several_sources_are_mixed():
    packs = [PackedDataset([torch.full((5,), value)] * 12, 16) for value in (1, 2)]
    mixture = Mixture({"one": (packs[0], 1), "two": (packs[1], 3)}, by="tokens", stop=20)
    loader = DataLoader(mixture, 4, collate_fn=PackedDataset.collate)
    read = torch.cat([batch["input_ids"][:, 0] for batch in loader]).tolist()
    assert Counter(read) == {1: 5, 2: 15}
    assert mixture.progress(20)["mixture/two/tokens"] == 15 * 16
    assert len(KeyedSampler(mixture)) == 20
