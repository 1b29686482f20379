"""User code that runs in `Traceless` leaves everything as it was, whatever it writes to."""

import array
import copy
import functools
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import ClassVar

import numpy
import pytest
import torch
from torch import nn

from echelon.strategies.module.traces import Traceless
from echelon.strategies.module.untouched import Untouched

needs_torchmetrics = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")

SEEN, COUNTS, TOTAL = [], {"steps": 0}, torch.zeros(())
number = 0
Pair = namedtuple("Pair", ["name", "values"])


@dataclass
class Meter:
    total: float = 0.0
    values: list = field(default_factory=list)

    def add(self, value):
        self.total += value
        self.values.append(value)


class Slotted:
    __slots__ = ("__hidden", "count", "later")

    def __init__(self):
        self.count, self.__hidden = 0, 0

    def add(self):
        self.count += 1
        self.__hidden += 1
        self.later = 1

    @property
    def state(self):
        return self.count, self.__hidden, hasattr(self, "later")


@dataclass(frozen=True)
class Frozen:
    values: list


class Net(nn.Module):
    """A small module, of which each test gives one attribute, and changes it by one function."""

    steps = 0
    by_class: ClassVar = []

    def __init__(self, **attributes):
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.dropout = nn.Dropout(0.5)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.dropout(self.norm(self.linear(x)))


def changed_and_restored(net, change, look, functions=()):
    """Check that a function changes what is looked at, and that it is as before afterwards."""
    before = look(net)
    with Traceless(net, functions):
        change(net)
        assert look(net) != before
    assert look(net) == before


# --- tensors ---------------------------------------------------------------------------------------------------------


def test_running_statistics_and_modes_are_restored():
    net = Net()
    changed_and_restored(net, lambda n: n(torch.ones(3, 2)), lambda n: {k: v.tolist() for k, v in n.named_buffers()})
    changed_and_restored(net, lambda n: n.eval(), lambda n: [part.training for part in n.modules()])


@pytest.mark.parametrize(
    "change",
    [
        lambda n: n.seen.add_(1),
        lambda n: n.seen.data.add_(1),
        lambda n: setattr(n.seen, "data", torch.ones(5)),
        lambda n: setattr(n, "seen", torch.ones(3)),
        lambda n: n.seen.resize_(1).fill_(2),
        lambda n: delattr(n, "seen"),
    ],
)
@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_tensor_is_restored_in_place_however_it_is_written(change, is_buffer):
    net, seen = Net(), torch.zeros(3)
    net.register_buffer("seen", seen) if is_buffer else setattr(net, "seen", seen)
    view = seen[:2]
    changed_and_restored(net, change, lambda n: n.seen.tolist() if hasattr(n, "seen") else None)
    assert net.seen is seen
    view.fill_(7)
    assert net.seen.tolist() == [7, 7, 0]


def test_an_expanded_tensor_and_an_inference_tensor_are_restored():
    with torch.inference_mode():
        made = torch.zeros(2)
    net = Net(wide=torch.zeros(1).expand(3), made=made)

    def change(n):
        n.wide[0:1].add_(1)
        with torch.inference_mode():
            n.made.add_(1)

    changed_and_restored(net, change, lambda n: (n.wide.tolist(), n.made.tolist()))


def test_a_tensor_that_backward_needs_is_not_written_to_unless_it_was_changed():
    net = Net(scale=torch.full((2,), 3.0))
    x = torch.ones(2, requires_grad=True)
    y = (x * net.scale).sum()
    with Traceless(net):
        net(torch.ones(3, 2))
    y.backward()
    assert x.grad.tolist() == [3, 3]


def test_tensors_that_are_trained_are_left_alone():
    net = Net(trained=torch.zeros(2, requires_grad=True))
    with Traceless(net), torch.no_grad():
        net.trained.add_(1)
        net.linear.weight.zero_()
    assert net.trained.tolist() == [1, 1]
    assert not net.linear.weight.any()


# --- containers and objects ------------------------------------------------------------------------------------------

CHANGES = {
    "list": ([1], lambda v: v.append(2)),
    "list of lists": ([[1], [2]], lambda v: v[1].append(2)),
    "list of tensors": ([torch.zeros(2)], lambda v: v[0].add_(1)),
    "dict": ({"a": 1}, lambda v: v.update(b=2)),
    "dict in a dict": ({"a": {"b": [1]}}, lambda v: v["a"]["b"].clear()),
    "set": ({1}, lambda v: v.add(2)),
    "deque": (deque([1, 2], maxlen=2), lambda v: v.append(3)),
    "Counter": (Counter("ab"), lambda v: v.update("a")),
    "defaultdict": (defaultdict(list), lambda v: v["a"].append(1)),
    "OrderedDict": (OrderedDict(a=1, b=2), lambda v: v.move_to_end("a")),
    "bytearray": (bytearray(b"a"), lambda v: v.append(3)),
    "array": (array.array("d", [1.0]), lambda v: v.append(3.0)),
    "NumPy array": (numpy.zeros(2), lambda v: v.__iadd__(1)),
    "named tuple": (Pair("a", [1]), lambda v: v.values.append(2)),
    "tuple": (([1], 2), lambda v: v[0].append(2)),
    "dataclass": (Meter(), lambda v: v.add(2)),
    "frozen dataclass": (Frozen([]), lambda v: v.values.append(2)),
    "object in a list": ([Meter()], lambda v: v[0].add(2)),
    "partial": (functools.partial(max, [1]), lambda v: v.args[0].append(2)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_container_or_object_is_restored_in_place(kind):
    value, change = CHANGES[kind]
    net = Net(value=value)
    changed_and_restored(net, lambda n: change(n.value), lambda n: repr(n.value))
    assert net.value is value


def test_an_object_with_slots_is_restored():
    changed_and_restored(Net(value=Slotted()), lambda n: n.value.add(), lambda n: n.value.state)


def test_numbers_added_attributes_and_attributes_that_were_removed_are_restored():
    net = Net(count=0, gone=[1])

    def change(n):
        n.count += 1
        n.added = 1
        n.extra = nn.Linear(1, 1)
        n.register_buffer("more", torch.zeros(1))
        del n.gone

    changed_and_restored(net, change, lambda n: (n.count, hasattr(n, "gone"), sorted(vars(n)), n._modules.keys()))
    assert list(dict(net.named_buffers())) == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]


def test_objects_that_refer_to_each_other_and_to_the_module_are_restored():
    meter = Meter()
    net = Net(meter=meter)
    meter.values.append(meter)
    meter.owner = [net]
    changed_and_restored(net, lambda n: setattr(n.meter, "total", 5), lambda n: n.meter.total)


def test_what_is_nearest_is_restored_though_there_are_too_many_objects(monkeypatch):
    monkeypatch.setattr("echelon.strategies.module.traces._MOST", 200)
    net = Net(many=[[i] for i in range(10_000)], value=[1])
    changed_and_restored(net, lambda n: n.value.append(2), lambda n: list(n.value))


def test_data_sets_optimizers_and_loaders_are_not_followed():
    class Samples(torch.utils.data.Dataset):
        def __init__(self):
            self.read = []

        def __len__(self):
            return 1

        def __getitem__(self, index):
            self.read.append(index)
            return index

    net = Net(samples=Samples())
    net.loader = torch.utils.data.DataLoader(net.samples)
    net.optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with Traceless(net):
        next(iter(net.loader))
        net.optimizer.param_groups[0]["lr"] = 2.0
    assert net.samples.read == [0]
    assert net.optimizer.param_groups[0]["lr"] == 2.0


# --- metrics and hooks -----------------------------------------------------------------------------------------------


def metric_state(metric):
    return metric.metric_state, metric._update_count, metric._computed


@needs_torchmetrics
@pytest.mark.parametrize("place", ["submodule", "list", "dict", "collection", "object"])
def test_a_metric_object_is_restored_wherever_it_is(place):
    from torchmetrics import CatMetric, MeanMetric, MetricCollection

    net, metrics = Net(), [MeanMetric(), CatMetric()]
    if place == "submodule":
        net.first, net.second = metrics
    elif place == "list":
        net.held = metrics
    elif place == "dict":
        net.held = dict(enumerate(metrics))
    elif place == "collection":
        net.held = MetricCollection({"a": metrics[0], "b": metrics[1]})
    else:
        net.held = Meter(values=metrics)
    for metric in metrics:
        metric.update(1.0)
        metric.compute()

    def change(_):
        for metric in metrics:
            metric.update(torch.tensor(3.0))
            metric(torch.tensor(2.0))
            metric.compute()
            metric.reset()
            metric.update(5.0)

    changed_and_restored(net, change, lambda _: repr([metric_state(metric) for metric in metrics]))
    assert [float(metric.compute()) for metric in metrics] == [1.0, 1.0]


@needs_torchmetrics
def test_the_tensors_in_a_list_of_a_metric_are_not_copied():
    from torchmetrics import CatMetric

    net = Net(metric=CatMetric())
    net.metric.update(torch.zeros(3))
    with Traceless(net) as traceless:
        assert not [kept for kept in traceless._kept._seen.values() if kept is net.metric.value[0]]


def test_hooks_are_as_before_and_what_they_count_is_restored():
    net, calls = Net(), {"number": 0, "list": []}

    def count(part, args, output):
        calls["number"] += 1
        calls["list"].append(len(args[0]))

    net.linear.register_forward_hook(count)

    def change(n):
        n(torch.ones(3, 2))
        n.norm.register_forward_hook(count)

    changed_and_restored(net, change, lambda n: (repr(calls), len(n.norm._forward_hooks)))


# --- random streams --------------------------------------------------------------------------------------------------


def draw(net):
    drawn = [torch.rand(1).item(), random.random(), numpy.random.rand()]
    drawn += [torch.rand(1, generator=net.torch).item(), net.python.random(), net.numpy.random(), net.old.rand()]
    return drawn


def test_random_streams_and_generators_go_back():
    net = Net(torch=torch.Generator(), python=random.Random(1), numpy=numpy.random.default_rng(1))
    net.old = numpy.random.RandomState(1)
    with Traceless(net) as traceless:
        inside = draw(net)
        traceless.put_back()
        assert draw(net) == inside
    assert draw(net) == inside
    assert draw(net) != inside


# --- what functions reach --------------------------------------------------------------------------------------------


def count_in_a_module():
    global number, only_later  # noqa: PLW0603 - as users do
    number += 1
    only_later = 1
    SEEN.append(1)
    COUNTS["steps"] += 1
    TOTAL.add_(1)


class Reaching(Net):
    shared = Meter()

    def step(self):
        self.count()

    def count(self):
        count_in_a_module()
        type(self).steps += 1
        Reaching.by_class.append(1)
        self.shared.add(1)


def test_globals_and_class_attributes_that_a_step_reaches_are_restored():
    net = Reaching()

    def look(n):
        named = number, "only_later" in globals(), len(SEEN), repr(COUNTS), TOTAL.item()
        return *named, n.steps, len(n.by_class), n.shared.total

    changed_and_restored(net, lambda n: n.step(), look, [net.step])
    assert "steps" not in vars(Reaching)


def test_globals_that_the_forward_of_a_submodule_reaches_are_restored():
    class Inner(nn.Module):
        def forward(self, x):
            count_in_a_module()
            return x

    changed_and_restored(Net(inner=Inner()), lambda n: n.inner(1), lambda n: (number, len(SEEN)))


def test_closures_defaults_and_attributes_of_functions_are_restored():
    total, values = 0, []

    def step(n, seen=[], *, more={}):  # noqa: B006 - it is to be restored
        nonlocal total
        total += 1
        values.append(1)
        seen.append(1)
        more["a"] = 1
        step.calls = 1

    def look(_):
        return total, len(values), repr(step.__defaults__), repr(step.__kwdefaults__), repr(vars(step))

    changed_and_restored(Net(), step, look, [step])
    changed_and_restored(Net(), step, look, [functools.partial(step)])


def test_a_batch_that_a_step_changes_is_restored():
    batch = {"x": torch.zeros(2), "y": [1]}

    def step(_):
        batch.pop("y")
        batch["x"].add_(1)

    changed_and_restored(Net(), step, lambda _: repr(batch), [batch])


def test_an_error_inside_the_block_passes_and_everything_is_restored():
    net = Net(values=[])

    def step():
        with Traceless(net):
            net.values.append(1)
            raise ValueError("a batch")

    with pytest.raises(ValueError, match="a batch"):
        step()
    assert not net.values


def test_an_untouched_module_is_in_eval_mode_also_after_it_was_rewound():
    net = Net(values=[])
    with Untouched(net) as untouched:
        net.values.append(1)
        assert not net.norm.training
        untouched.rewind()
        assert not net.norm.training
        assert not net.values
    assert net.norm.training
    assert net.training


def test_attributes_of_a_class_that_was_made_of_the_users_are_restored():
    net = Net()
    net.__class__ = type("ShardedNet", (Net,), {"__module__": "torch.distributed"})  # as fully_shard does
    changed_and_restored(net, lambda n: setattr(type(n), "steps", type(n).steps + 1), lambda n: n.steps)


def test_a_layer_that_is_made_by_its_first_forward_stays_made():
    net = Net(lazy=nn.LazyLinear(3))
    with Untouched(net):
        net.lazy(torch.ones(2, 2))
    assert type(net.lazy) is nn.Linear
    assert net.lazy.training
    assert net.lazy(torch.ones(2, 2)).shape == (2, 3)


def test_a_library_that_adds_hooks_once_adds_them_again_after_a_rehearsal():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=12,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        pad_token_id=None,
    )
    model, tokens = transformers.LlamaForCausalLM(config).eval(), torch.arange(8).view(2, 4)
    expected = copy.deepcopy(model)(tokens, output_hidden_states=True).hidden_states
    with Untouched(model):
        model(tokens, output_hidden_states=True)
    torch.testing.assert_close(model(tokens, output_hidden_states=True).hidden_states, expected)
