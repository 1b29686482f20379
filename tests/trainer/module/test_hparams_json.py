"""Hyper-parameters return from JSON unchanged, and a stored value runs no code."""

import enum
import json
import sys
from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from echelon.common.errors import CheckpointError
from echelon.trainer.module.hparams_json import from_jsonable, to_jsonable


class Mode(enum.Enum):
    FAST = "fast"


class Holder:
    class Inner(enum.IntEnum):
        ONE = 1


@dataclass
class Config:
    width: int = 3


def through_file(value):
    stored, omitted = to_jsonable({"value": value})
    assert omitted == []
    return from_jsonable(json.loads(json.dumps(stored, allow_nan=False)))["value"]


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2**80,
        0.1,
        float("inf"),
        "text",
        [1, [2.5, "a"]],
        (3, (4, [5])),
        {"a": {"b": (1,)}},
        {1: "int", ("t", 2): "tuple", "$tuple": "user's own"},
        {"$tuple": [1]},
        {1, 2},
        Path("some/folder"),
        torch.bfloat16,
        torch.device("cuda:1"),
        Mode.FAST,
        Holder.Inner.ONE,
    ],
    ids=repr,
)
def test_a_value_comes_back_equal_and_of_the_same_type(value):
    again = through_file(value)
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (OmegaConf.create({"a": 1, "b": ["${a}"]}), {"a": 1, "b": [1]}),
        (Namespace(a=(1,)), {"a": (1,)}),
        (Config(5), {"width": 5}),
        (OrderedDict(a=1), {"a": 1}),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (range(3), [0, 1, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_containers_and_numbers_come_back_as_plain_ones(value, plain):
    assert through_file(value) == plain


def test_not_a_number_comes_back_too():
    assert through_file(float("nan")) != through_file(float("nan"))


def test_what_json_cannot_hold_is_omitted_by_name_with_the_container_around_it():
    stored, omitted = to_jsonable(
        {
            "lr": 0.1,
            "net": nn.Linear(1, 1),
            "function": len,
            "weight": torch.ones(2),
            "layers": [1, {"act": nn.ReLU()}],
            "raw": b"bytes",
        }
    )
    assert stored == {"lr": 0.1}
    assert omitted == ["net", "function", "weight", "layers", "raw"]


def test_an_enum_that_is_not_imported_comes_back_as_its_value():
    stored, _ = to_jsonable({"mode": Mode.FAST})
    where, name, value = stored["mode"]["$enum"]
    assert from_jsonable({"mode": {"$enum": ["a_module_not_imported:Mode", name, value]}}) == {"mode": "fast"}
    assert from_jsonable({"mode": {"$enum": [where, "GONE", value]}}) == {"mode": "fast"}


def test_a_stored_name_imports_nothing_and_reaches_nothing_but_enums():
    loaded = set(sys.modules)
    for where in ("antigravity:Mode", "torch:_dynamo.x", "os:environ", "builtins:exec"):
        assert from_jsonable({"mode": {"$enum": [where, "FAST", "fast"]}}) == {"mode": "fast"}
    assert from_jsonable({"dtype": {"$dtype": "load"}}) == {"dtype": "load"}
    assert set(sys.modules) == loaded


class Encoder(nn.Linear):
    pass


def test_a_class_is_stored_by_name_and_comes_back_where_it_may_be_named():
    stored, omitted = to_jsonable(
        {"net": {"cls": Encoder, "width": 3}, "act": nn.ReLU, "mode": Mode, "array": np.ndarray}
    )
    assert omitted == []
    assert stored["act"] == {"$class": "torch.nn.modules.activation:ReLU"}
    stored = json.loads(json.dumps(stored))
    array = {"array": stored.pop("array")}
    assert from_jsonable(stored, owner=Encoder) == {"net": {"cls": Encoder, "width": 3}, "act": nn.ReLU, "mode": Mode}
    with pytest.raises(CheckpointError, match=r"of Encoder names the class 'numpy:ndarray'.*add_safe_globals"):
        from_jsonable(array, owner=Encoder)
    with torch.serialization.safe_globals([np.ndarray]):
        assert from_jsonable(array, owner=Encoder) == {"array": np.ndarray}


def test_an_array_is_stored_by_its_items():
    arrays = {
        "ids": np.array(["PAD", 3, None, 1.5], dtype=object),
        "table": np.arange(6, dtype=np.int16).reshape(2, 3),
        "names": np.array(["a", "longer"]),
        "weights": np.array([[0.1], [1e-30]], dtype=np.float32),
        "none": np.zeros((0, 2), dtype=bool),
    }
    stored, omitted = to_jsonable({**arrays, "deep": [arrays]})
    assert omitted == [] and stored["names"] == {"$items": ["str", [2], ["a", "longer"]]}
    loaded = from_jsonable(json.loads(json.dumps(stored)))
    for found in (loaded, loaded["deep"][0]):
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype and found[name].shape == array.shape
            assert found[name].tolist() == array.tolist()


def test_other_arrays_are_omitted_and_forged_ones_refused():
    odd = [np.array([object()]), np.array([np.nan]), np.array([1j]), np.zeros(3, "datetime64[s]"), np.zeros(1_000_001)]
    odd += [np.zeros(2, [("a", int)]), np.array([{}, []], dtype=object), np.array([b"x"]), np.bool_(True)]
    for array in odd:
        assert to_jsonable({"array": array}) == ({}, ["array"])
    for content in (["U1000000000", [1], ["a"]], ["int64", [1 << 40], [1]], ["int8", [1], ["a"]], ["int8"], 3, None):
        with pytest.raises(CheckpointError, match="Echelon does not write"):
            from_jsonable({"array": {"$items": content}})


@pytest.mark.parametrize(
    "where",
    [
        "subprocess:Popen",
        "torch.nn.parallel:DistributedDataParallel.__init__",
        "torch.nn.modules.module:warnings",
        "not_imported:Encoder",
        "builtins:eval",
        "",
        None,
        ["torch.nn:Linear"],
    ],
    ids=repr,
)
def test_a_forged_class_is_refused(where):
    with pytest.raises(CheckpointError):
        from_jsonable({"cls": {"$class": where}}, owner=Encoder)


def test_a_local_class_is_omitted():
    class Local:
        pass

    assert to_jsonable({"cls": Local}) == ({}, ["cls"])
