"""What travels between processes, and what is said of that which cannot."""

import functools
import threading

import pytest
from torch import nn

from echelon.strategies.errors import ConfigError
from echelon.strategies.travel import find_culprit, pack, unpack


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


@pytest.mark.parametrize(
    ("root", "path"),
    [
        (Holder(a=1, b=Holder(lock=LOCK)), "it.b.lock"),
        (Holder(items=[0, {"x": LOCK}]), "it.items[1]['x']"),
        (functools.partial(print, 1, key=LOCK), "it.keywords['key']"),
        (Holder(lock=LOCK).method, "it.lock"),
        (lambda: LOCK, "LOCK"),
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
        ConfigError, match=r"module\.lock \(lock\) cannot travel between processes: .*; create it in set"
    ):
        pack(Holder(lock=LOCK).method, parts={"module": Holder(lock=LOCK)})


def test_a_class_that_comes_back_is_not_changed():
    class Local:
        def method(self):
            return 1

    Local.__module__ = "__main__"
    method = Local.method
    back = unpack(pack(Local()))
    assert type(back) is Local
    assert Local.method is method
