"""Pickling between processes, and the error for what cannot be pickled."""

import functools
import importlib.util
import sys
import threading
import tracemalloc

import pytest
import torch
from programs import run_program
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from echelon.common.errors import ConfigError
from echelon.strategies.distributed.pickling import find_culprit, pack_into, pack_value, unpack_from, unpack_value
from echelon.testing import run_ranks


class Holder:
    def __init__(self, **parts):
        self.__dict__.update(parts)

    def method(self):
        pass


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 1), nn.ReLU())


LOCK = threading.Lock()


def enclosed(lock):
    return lambda: lock


@pytest.mark.parametrize(
    ("root", "path"),
    [
        (Holder(a=1, b=Holder(lock=LOCK)), "it.b.lock"),
        (Holder(items=[0, {"x": LOCK}]), "it.items[1]['x']"),
        (functools.partial(print, 1, key=LOCK), "it.keywords['key']"),
        (Holder(lock=LOCK).method, "it.lock"),
        (lambda: LOCK, "LOCK"),
        (enclosed(LOCK), "lock"),
        (LOCK, "it"),
    ],
)
def test_the_path_leads_to_what_cannot_travel(root, path):
    assert find_culprit({"fine": Holder(), "it": root}) == (path, LOCK)


def test_modules_are_searched_as_they_are_written():
    net = Net()
    net.layers[1].lock = LOCK
    assert find_culprit({"module": net}) == ("module.layers.1.lock", LOCK)


def test_a_cycle_ends_the_search():
    one = Holder(lock=LOCK)
    two = Holder(one=one)
    one.two = two
    assert find_culprit({"two": two}) == ("two.one.lock", LOCK)


def test_what_travels_has_no_culprit():
    assert find_culprit({"it": Holder(a=[1, {"b": Net()}])}) is None


def test_the_error_names_the_part_and_what_to_do():
    with pytest.raises(
        ConfigError, match=r"module\.lock \(lock\) cannot be sent to other processes: .*; create it in set"
    ):
        pack_value(Holder(lock=LOCK).method, parts={"module": Holder(lock=LOCK)})


def test_a_class_that_comes_back_is_not_changed():
    class Local:
        def method(self):
            return 1

    Local.__module__ = "__main__"
    method = Local.method
    back = unpack_value(pack_value(Local()))
    assert type(back) is Local
    assert Local.method is method


def test_a_class_inside_a_function_keeps_its_qualified_name():
    class Inside:
        class Within:
            pass

    names = [Inside.__qualname__, Inside.Within.__qualname__]
    assert names[1].endswith("name.<locals>.Inside.Within")
    assert run_ranks(lambda: [Inside.__qualname__, Inside.Within.__qualname__], 1) == [names]


def test_a_module_that_only_this_process_has_travels_too(tmp_path, monkeypatch):
    (tmp_path / "loaded_from_a_file.py").write_text("FACTOR = 3\n\ndef tripled(number):\n    return number * FACTOR\n")
    spec = importlib.util.spec_from_file_location("loaded_from_a_file", tmp_path / "loaded_from_a_file.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "loaded_from_a_file", module)
    packed = pack_value(functools.partial(module.tripled, 2))
    monkeypatch.delitem(sys.modules, "loaded_from_a_file")
    assert unpack_value(packed)() == 6


def test_a_named_tuple_of_the_main_program_travels(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from typing import NamedTuple\n"
        "from echelon.testing import run_ranks\n"
        "class Pair(NamedTuple):\n    left: int\n    right: int = 2\n"
        "def swapped(pair):\n    return Pair(pair.right, pair.left)\n"
        "[pair] = run_ranks(swapped, 1, Pair(1))\n"
        "assert pair == (2, 1) and type(pair) is Pair, pair\n"
    )
    done = run_program(script, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_tensors_go_through_a_file_without_a_copy(tmp_path):
    tensors = [torch.full((250_000,), float(index)) for index in range(8)]  # of 1 MB each
    with (tmp_path / "tensors").open("w+b") as file:
        tracemalloc.start()
        try:
            pack_into(file, tensors)
            most = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        file.seek(0)
        assert all(torch.equal(one, other) for one, other in zip(unpack_from(file), tensors, strict=True))
    assert most < 1e6


class TooLarge:
    def __reduce__(self):
        raise MemoryError("no room")


def test_too_little_memory_is_no_fault_of_the_value():
    with pytest.raises(MemoryError, match="no room"):
        pack_value(Holder(part=TooLarge()), "result")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint16, torch.float8_e4m3fn, torch.bool])
def test_tensors_of_every_dtype_travel(dtype):
    tensor = torch.arange(6).to(dtype).view(2, 3)
    again = unpack_value(pack_value({"whole": tensor, "part": tensor[:, 1:]}))
    for name, value in (("whole", tensor), ("part", tensor[:, 1:])):
        assert again[name].dtype == dtype
        assert torch.equal(again[name].float(), value.float())


def test_parametrized_layers_travel():
    layer = parametrizations.weight_norm(nn.Linear(4, 4))
    found = unpack_value(pack_value(nn.Sequential(layer, nn.ReLU())))[0]
    assert isinstance(found, nn.Linear)
    torch.testing.assert_close(found.state_dict(), layer.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(found.weight, layer.weight, rtol=0, atol=0)
    parametrize.remove_parametrizations(found, "weight")
    assert type(found) is nn.Linear
    layer.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"the function\.0\.lock \(lock\) cannot be sent"):
        pack_value(nn.Sequential(layer))


def test_code_keeps_the_name_of_its_file_and_its_lines(tmp_path):
    program, names = tmp_path / "program.py", {"__name__": "__main__"}
    exec(compile("\n\ndef fail():\n    raise ValueError('here')\n", str(program), "exec"), names)  # noqa: S102 - as Python runs one
    code = unpack_value(pack_value(names["fail"], "fail")).__code__
    assert (code.co_filename, code.co_firstlineno) == (str(program), 3)
