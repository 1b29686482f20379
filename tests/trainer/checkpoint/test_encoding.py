"""What goes into a checkpoint comes out of it, with the same bits and types; what cannot is refused by name."""

from __future__ import annotations

import enum
import json
import math
import random
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echelon.common.errors import CheckpointError
from echelon.trainer.checkpoint import load, save


class Mode(enum.Enum):
    """Members whose value JSON lacks."""

    FAST = (1, "fast")


class Level(enum.IntEnum):
    """Members that are numbers."""

    LOW = 1


PLAIN: dict[str, Any] = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**63, 10**40],
    "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf],
    "text": ["", "ä\u0000\ud800", "$tensor"],
    "dollar keys": {"$tensor": 1, "": 2},
    "keys": {1: "a", False: "0", None: "b", (1, "x"): "c", 2.5: "d", b"k": "e"},
    "tuples": (1, (2, [3, ()])),
    "empty": [{}, [], (), set(), b""],
    "bytes": b"\x00\xff",
    "complex": complex(math.inf, -0.0),
    "sets": [{1, 2}, frozenset({"a"})],
    "deques": [deque([1, 2], maxlen=3), deque()],
    "counter": Counter({3: 2, "x": 1}),
    "times": [timedelta(days=-1, microseconds=7), datetime(2026, 1, 2, 3, 4, 5, 6, UTC), date(2026, 1, 2)],
    "path": Path("a/../b"),
    "torch": [torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3])],
    "python rng": random.Random(3).getstate(),
    "namespaces": [Namespace(a=(1, 2), b=Namespace()), Namespace()],
    "enums": [Mode.FAST, Level.LOW],
}
TENSORS: dict[str, Tensor] = {
    str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.complex64, torch.complex128,
    )
}  # fmt: skip
TENSORS |= {
    "zero-dimensional": torch.tensor(7.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(4, 5).t(),
    "strided": torch.randn(4, 6)[::2, 1::2],
    "expanded": torch.randn(1, 3).expand(4, 3),
    "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
    "nan": torch.tensor([math.nan, -math.inf, -0.0]),
    "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
}


def roundtrip(value: Any, folder: Path) -> Any:
    save(folder / "a.ckpt", {"part": value})
    return load(folder / "a.ckpt")["part"]


def assert_same(first: Any, second: Any) -> None:
    assert type(first) is type(second)
    if isinstance(first, dict):
        assert [(k, type(k)) for k in first] == [(k, type(k)) for k in second]
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for left, right in zip(first, second, strict=True):
            assert_same(left, right)
    else:
        assert repr(first) == repr(second)
        assert first == second


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_value_comes_back_with_its_type(name: str, tmp_path: Path) -> None:
    assert_same(roundtrip(PLAIN[name], tmp_path), PLAIN[name])


def test_an_enum_member_whose_class_is_gone_comes_back_as_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a.ckpt", {"part": Mode.FAST})
    monkeypatch.delitem(sys.modules, __name__)
    assert load(tmp_path / "a.ckpt")["part"] == (1, "fast")


def test_nan_comes_back(tmp_path: Path) -> None:
    assert math.isnan(roundtrip([math.nan], tmp_path)[0])


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_to_the_bit(name: str, tmp_path: Path) -> None:
    tensor = TENSORS[name]
    loaded = roundtrip({"deep": [tensor]}, tmp_path)["deep"][0]
    assert loaded.dtype == tensor.dtype
    assert loaded.shape == tensor.shape
    whole = tensor.resolve_conj().resolve_neg().contiguous()
    assert torch.equal(loaded.contiguous().reshape(-1).view(torch.uint8), whole.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.array(3.5),
        np.asfortranarray(np.random.default_rng(0).standard_normal((3, 4))),
        np.arange(9)[::-2],
        np.array([1 + 2j]),
        np.array([], dtype=np.float16),
    ],
)
def test_an_array_comes_back(value: np.ndarray[Any, Any], tmp_path: Path) -> None:
    loaded = roundtrip({"a": value}, tmp_path)["a"]
    assert isinstance(loaded, np.ndarray)
    assert loaded.dtype == value.dtype
    np.testing.assert_array_equal(loaded, value)


@pytest.mark.parametrize("value", [np.float64(0.1), np.int8(-3), np.bool_(True), np.float32(3.3)])
def test_an_array_scalar_keeps_its_type(value: Any, tmp_path: Path) -> None:
    loaded = roundtrip(value, tmp_path)
    assert type(loaded) is type(value)
    assert loaded == value


def test_numpy_random_state_continues_the_same_sequence(tmp_path: Path) -> None:
    generator = np.random.RandomState(5)
    state = generator.get_state()
    expected = generator.random_sample(4)
    generator.set_state(roundtrip(state, tmp_path))
    np.testing.assert_array_equal(generator.random_sample(4), expected)


def test_state_of_optimizers_and_schedulers_comes_back(tmp_path: Path) -> None:
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 4]),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=9),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7),
    ]
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for scheduler in schedulers:
        scheduler.step()
    stateful: Any
    for stateful in (optimizer, *schedulers):
        before = stateful.state_dict()
        assert str(roundtrip(before, tmp_path)) == str(before)


def test_an_ordered_dict_comes_back_as_a_dict_in_its_order(tmp_path: Path) -> None:
    assert_same(roundtrip(OrderedDict(b=1, a=2), tmp_path), {"b": 1, "a": 2})


def test_tied_tensors_are_stored_once_and_tied_when_read(tmp_path: Path) -> None:
    weight = torch.randn(100, 100)
    save(tmp_path / "a.ckpt", {"model": {"a": weight, "b": weight, "c": weight.view(10_000), "half": weight[:50]}})
    model = load(tmp_path / "a.ckpt")["model"]
    assert model["a"].data_ptr() == model["b"].data_ptr()
    assert torch.equal(model["c"], weight.view(10_000))
    assert torch.equal(model["half"], weight[:50])
    # c and half are other views of the memory: their values are stored by themselves
    assert (tmp_path / "a.ckpt" / "model.safetensors").stat().st_size < 4 * 25_000 + 2_000


def test_tensors_whose_places_make_one_name_are_kept_apart(tmp_path: Path) -> None:
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: torch.full((1,), 2.0), "1": torch.full((1,), 3.0)}
    loaded = roundtrip(state, tmp_path)
    values = [loaded["a.b"], loaded["a"]["b"], loaded[1], loaded["1"]]
    assert [value.item() for value in values] == [0, 1, 2, 3]


def test_a_parameter_is_saved_as_its_values(tmp_path: Path) -> None:
    loaded = roundtrip({"w": nn.Parameter(torch.ones(2))}, tmp_path)["w"]
    assert type(loaded) is Tensor
    assert not loaded.requires_grad


def test_writing_to_a_loaded_tensor_changes_no_file(tmp_path: Path) -> None:
    loaded = roundtrip({"w": torch.ones(1000)}, tmp_path)
    loaded["w"].zero_()
    assert load(tmp_path / "a.ckpt")["part"]["w"].sum() == 1000


class Custom:
    """Nothing that a checkpoint knows."""


@pytest.mark.parametrize(
    "value",
    [
        Custom(),
        lambda: 0,
        np.array(["text"]),
        np.datetime64("2026-01-01"),
        torch.ones(2).to_sparse(),
        torch.empty(2, device="meta"),
        nn.LazyLinear(2).weight,
        type("MyInt", (int,), {})(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_saved_is_named_before_anything_is_written(value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\['callbacks'\]\['x'\]\[1\] is .*"):
        save(tmp_path / "a.ckpt", {"model": {"w": torch.ones(1)}, "callbacks": {"x": [0, value]}})
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_contains_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    state["me"] = state
    with pytest.raises(CheckpointError, match="contains itself"):
        save(tmp_path / "a.ckpt", {"loop": state})


def test_parts_may_have_any_name(tmp_path: Path) -> None:
    names = ["../x", "a b", "", "a/b", "a.b", "$x", "\u00e9", "state", "manifest", "x" * 300, "A", "a"]
    save(tmp_path / "a.ckpt", {name: torch.full((1,), float(number)) for number, name in enumerate(names)})
    loaded = load(tmp_path / "a.ckpt")
    assert {name: int(value) for name, value in loaded.items()} == {name: number for number, name in enumerate(names)}
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_part_that_is_no_string_is_refused(tmp_path: Path) -> None:
    state: dict[Any, Any] = {3: 1}
    with pytest.raises(CheckpointError, match="part 3 of type int"):
        save(tmp_path / "a.ckpt", state)


def test_state_json_is_strict_json(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", {"part": PLAIN})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads((tmp_path / "a.ckpt" / "state.json").read_text(), parse_constant=refuse)


def test_only_the_parts_asked_for_are_read(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", {"model": {"w": torch.ones(1)}, "optimizers": [torch.zeros(1)], "step": 3})
    (tmp_path / "a.ckpt" / "optimizers.safetensors").unlink()
    assert load(tmp_path / "a.ckpt", parts=["step"]) == {"step": 3}
    assert load(tmp_path / "a.ckpt", parts=["model"])["model"]["w"] == 1
    with pytest.raises(CheckpointError, match="no part 'modell'. Did you mean 'model'"):
        load(tmp_path / "a.ckpt", parts=["modell"])


@pytest.mark.parametrize("lazy", [(), ("model",)])
def test_a_loaded_tensor_owns_its_storage(lazy: tuple[str, ...], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    state = {"first": torch.ones(100_000), "generator": generator.get_state(), "last": torch.ones(7, dtype=torch.int8)}
    expected = torch.rand(4, generator=generator)
    save(tmp_path / "a.ckpt", {"model": state, "callbacks": {"mine": state}})
    loaded = load(tmp_path / "a.ckpt", lazy=lazy)
    tensors = [*loaded["callbacks"]["mine"].values(), loaded["model"]["generator"], loaded["model"]["last"]]
    for tensor in tensors:
        assert type(tensor) is Tensor
        assert tensor.storage_offset() == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
        tensor.add_(0)  # it may be written to
    for part in (loaded["callbacks"]["mine"], loaded["model"]):
        # torch reads the state from the beginning of the storage, wherever the tensor begins
        generator.set_state(part["generator"])
        assert torch.equal(torch.rand(4, generator=generator), expected)
