"""Several loaders read as one give Lightning's batches, indices and lengths in each mode."""

import math
from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from echelon.common.errors import ConfigError, DataError
from echelon.trainer.data.combined_loader import CombinedLoader

SHORT, LONG = ["a", "b"], [0, 1, 2]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Counted:
    def __init__(self, length):
        self.length = length
        self.starts = 0

    def __iter__(self):
        self.starts += 1
        return iter(range(self.length))


# what Lightning 2.6.6 yields for the same loaders
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min_size", [(("a", 0), 0, 0), (("b", 1), 1, 0)]),
        ("max_size", [(("a", 0), 0, 0), (("b", 1), 1, 0), ((None, 2), 2, 0)]),
        ("max_size_cycle", [(("a", 0), 0, 0), (("b", 1), 1, 0), (("a", 2), 2, 0)]),
        ("sequential", [("a", 0, 0), ("b", 1, 0), (0, 0, 1), (1, 1, 1), (2, 2, 1)]),
    ],
)
def test_each_mode_combines_as_its_name_says(mode, expected):
    combined = CombinedLoader((SHORT, LONG), mode)
    assert list(combined) == expected
    assert list(combined) == expected
    assert len(combined) == len(expected)


@pytest.mark.parametrize(
    ("mode", "limits", "expected"),
    [
        ("min_size", [2, 1], [("a", 0)]),
        ("max_size", [1, 2], [("a", 0), (None, 1)]),
        ("max_size_cycle", [2, 1], [("a", 0), ("b", 1)]),
        ("max_size_cycle", 0, []),
        ("sequential", [1, 2], ["a", 0, 1]),
        ("sequential", [0, math.inf], [0, 1, 2]),
    ],
)
def test_limits_bound_what_is_taken_of_each_loader(mode, limits, expected):
    combined = CombinedLoader([SHORT, LONG], mode)
    combined.limits = limits
    assert [tuple(batch) if isinstance(batch, list) else batch for batch, _, _ in combined] == expected
    assert len(combined) == len(expected)


def test_batches_come_in_the_structure_of_the_loaders():
    Pair = namedtuple("Pair", "x y")
    combined = CombinedLoader({"a": [SHORT, Pair(LONG, (LONG,))]}, "min_size")
    assert combined.flattened == [SHORT, LONG, LONG]
    assert next(iter(combined))[0] == {"a": ["a", Pair(0, (0,))]}


def test_torch_loaders_are_combined_too():
    combined = CombinedLoader(
        {"x": DataLoader(range(6), batch_size=4), "y": DataLoader(range(15), batch_size=5)}, "max_size"
    )
    rows = [batch for batch, _, _ in combined]
    assert len(rows) == len(combined) == 3
    assert torch.equal(rows[1]["x"], torch.tensor([4, 5]))
    assert rows[2]["x"] is None


def test_replacing_the_flat_loaders_keeps_the_structure():
    combined = CombinedLoader({"a": SHORT, "b": [LONG]})
    combined.flattened = [LONG, SHORT]
    assert combined.iterables == {"a": LONG, "b": [SHORT]}
    with pytest.raises(ConfigError, match="Mismatch in flattened length \\(1\\) and existing length \\(2\\)"):
        combined.flattened = [LONG]
    with pytest.raises(ConfigError, match=r"limits=\[1\] are 1 numbers for 2 loaders"):
        combined.limits = [1]


def test_a_misspelt_mode_is_pointed_out():
    with pytest.raises(ConfigError, match="Unsupported mode 'max_size_cicle'.*Did you mean 'max_size_cycle'"):
        CombinedLoader([SHORT], "max_size_cicle")


def test_a_loader_without_a_length_leaves_the_others_to_bound_it():
    stream = DataLoader(Stream(), batch_size=None)
    assert len(CombinedLoader([stream, SHORT], "min_size")) == 2
    combined = CombinedLoader([stream, SHORT], "max_size")
    assert [batch for batch, _, _ in combined] == [[0, "a"], [1, "b"], [2, None]]
    with pytest.raises(TypeError, match="has a loader without a length, so it has no length; set limits"):
        len(combined)
    combined.limits = 2
    assert len(combined) == 2


def test_an_empty_loader_cannot_be_begun_again():
    with pytest.raises(DataError, match="Loader 0 of CombinedLoader.*is empty"):
        list(CombinedLoader([range(0), LONG], "max_size_cycle"))


def test_sequential_begins_a_loader_only_when_it_is_its_turn():
    first, second = Counted(2), Counted(1)
    items = iter(CombinedLoader([first, second], "sequential"))
    next(items), next(items)
    assert (first.starts, second.starts) == (1, 0)


def test_loaders_of_one_length_are_not_begun_again_at_the_end():
    first, second = Counted(2), Counted(2)
    assert len(list(CombinedLoader([first, second], "max_size_cycle"))) == 2
    assert (first.starts, second.starts) == (1, 1)


def test_no_loaders_are_no_batches():
    assert list(CombinedLoader([], "sequential")) == list(CombinedLoader([], "min_size")) == []
    assert len(CombinedLoader([], "max_size")) == 0
