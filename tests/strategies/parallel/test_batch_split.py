"""A batch is split by its samples, and the results are merged into what the whole batch would have given."""

from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

from echelon import DataError, ModuleError
from echelon.strategies.parallel.batch_split import combine_results, split_batch


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Graph:
    nodes: torch.Tensor
    name: str


@dataclass(frozen=True)
class Total:
    total: torch.Tensor
    count: int

    def __add__(self, other):
        return Total(self.total + other.total, self.count + other.count)


@pytest.mark.parametrize(
    ("length", "num_parts", "sizes"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (5, 4, [2, 2, 1]), (2, 4, [1, 1]), (1, 4, [1]), (5, 1, [5])],
)
def test_parts_are_those_of_torch_chunk(length, num_parts, sizes):
    x = torch.arange(length)
    parts, found = split_batch(x, num_parts)
    assert found == sizes
    for part, expected in zip(parts, x.chunk(num_parts), strict=True):
        assert torch.equal(part, expected)


def test_every_tensor_of_a_batch_is_cut_and_every_list_with_an_entry_for_each_sample():
    x, y, z = torch.arange(3), torch.arange(6).reshape(3, 2), torch.tensor(7.0)
    batch = {
        "pair": Pair(x, y),
        "names": ["a", "b", "c"],
        "list": [x, y],
        "graph": Graph(x, "g"),
        "user": UserDict({"x": x}),
        "whole": (z, "abc", 3, None, ["p", "q"]),
    }
    [first, second], sizes = split_batch(batch, 2)
    assert sizes == [2, 1]
    for part, rows in ((first, slice(0, 2)), (second, slice(2, 3))):
        assert type(part["pair"]) is Pair
        assert type(part["user"]) is UserDict
        assert part["names"] == batch["names"][rows]
        assert part["graph"].name == "g"
        for found, whole in ((part["pair"].x, x), (part["pair"].y, y), (part["list"][1], y), (part["graph"].nodes, x)):
            assert torch.equal(found, whole[rows])
        assert torch.equal(part["user"]["x"], x[rows])
        assert part["whole"] == batch["whole"]


def test_a_batch_without_rows_is_one_part():
    for batch in ("text", torch.tensor(3.0), {"x": torch.tensor(1)}, object(), None, []):
        assert split_batch(batch, 4) == ([batch], [1])
    empty = torch.zeros(0)
    assert split_batch(empty, 4) == ([empty], [0])


def test_rows_that_do_not_belong_together_are_an_error_where_they_would_be_cut():
    batch = [torch.zeros(8), torch.zeros(3)]
    assert split_batch(batch, 1) == ([batch], [8])
    with pytest.raises(DataError, match=r"must have equal lengths .*got \[8, 3\]; give each tensor one row"):
        split_batch(batch, 2)


def test_results_of_parts_become_the_result_of_the_whole():
    def result(start, stop):
        x = torch.arange(start, stop, dtype=torch.float64)
        return {
            "mean": x.mean(),
            "per_feature": torch.stack([x, 2 * x]).mean(1, keepdim=True).T,
            "number": x.mean().item(),
            "correct": (x > 1).sum(),
            "count": len(x),
            "rows": (x, torch.stack([x, x], 1)),
            "texts": [str(int(one)) for one in x],
            "boxes": [{"box": torch.ones(int(one))} for one in x],
            "two": [x, -x],
            "graph": Graph(x, "g"),
            "total": Total(x.sum(), len(x)),
            "user": UserDict({"x": x}),
            "none": None,
            "flag": True,
            "pair": Pair(x, x.mean()),
        }

    found, expected = combine_results([result(0, 3), result(3, 5)], [3, 2], "training_step"), result(0, 5)
    assert found.keys() == expected.keys()
    assert found.pop("graph").nodes.tolist() == expected.pop("graph").nodes.tolist() == [0, 1, 2, 3, 4]
    assert found.pop("total") == expected.pop("total")
    assert type(found["pair"]) is Pair
    user, expected_user = found.pop("user"), expected.pop("user")
    assert type(user) is UserDict
    torch.testing.assert_close(dict(user), dict(expected_user))
    for name in ("texts", "none", "flag"):
        assert found.pop(name) == expected.pop(name)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-15)


def test_results_that_are_none_are_left_out():
    assert combine_results([None, None], [2, 2], "training_step") is None
    results = [torch.tensor(1.0), None, torch.tensor(4.0)]
    assert combine_results(results, [2, 5, 1], "training_step").item() == 2.0


@pytest.mark.parametrize(
    ("results", "found"),
    [
        ([torch.zeros(3, 2), torch.zeros(2, 4)], r"step must return.*shape \(3, 2\), shape \(2, 4\)"),
        ([{"a": 1}, {"b": 1}], r"step must return.*\['a'\], \['b'\]"),
        ([{"a": torch.zeros(())}, {"a": 1.0}], r"step\['a'\] must return.*Tensor, float"),
        ([(1, 2), (1,)], "2 entries, 1 entries"),
        ([{"a": "x"}, {"a": "y"}], r"step\['a'\] must return.*x, y"),
        ([object(), object()], "object"),
    ],
)
def test_results_that_cannot_be_combined_are_an_error(results, found):
    with pytest.raises(ModuleError, match=rf"(?s){found}.*return tensors with a row for each sample"):
        combine_results(results, [3, 2], "step")
