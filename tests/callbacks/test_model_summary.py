"""The model summary: what it counts, what it shows, and that it leaves no trace."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scripted import Scripted, batches, trainer_in
from torch import Tensor, nn

from echelon.callbacks import ModelSummary, summarize
from echelon.callbacks.model_summary import format_count
from echelon.common.errors import ConfigError


class Net(nn.Module):
    def __init__(self, example: object = None) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5))
        self.head = nn.Linear(16, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(3))
        self.example_input_array = example

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)) * self.scale.sum()


class Exemplary(Scripted):
    """Has a forward, and a float32 input for it."""

    example_input_array = torch.randn(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_parameters_are_counted_by_trainability() -> None:
    net = Net()
    net.head.weight.requires_grad = False
    summary = summarize(net)
    expected = 8 * 16 + 16 + 2 * 16 + 3
    assert summary.trainable_parameters == expected
    assert summary.total_parameters == expected + 32
    assert summary.parameter_bytes == 4 * (expected + 32)


def test_rows_go_down_to_the_asked_depth() -> None:
    names = {depth: [layer.name for layer in summarize(Net(), depth).layers] for depth in (0, 1, 2, -1)}
    nested = ["encoder", "encoder.0", "encoder.1", "encoder.2", "head", "(own parameters)"]
    assert names == {0: [], 1: ["encoder", "head", "(own parameters)"], 2: nested, -1: nested}


def test_shared_parameters_count_once() -> None:
    net = nn.ModuleDict({"a": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 4, bias=False)})
    net["b"].weight = net["a"].weight
    summary = summarize(net)
    assert summary.total_parameters == 16
    assert [layer.parameters for layer in summary.layers] == [16, 16]


@pytest.mark.parametrize("form", [lambda x: x, lambda x: (x,), lambda x: {"x": x}], ids=["tensor", "tuple", "dict"])
def test_an_example_input_shows_shapes_and_counts_flops(form: object) -> None:
    summary = summarize(Net(form(torch.randn(4, 8))), 2)  # type: ignore[operator]
    by_name = {layer.name: layer for layer in summary.layers}
    assert by_name["encoder"].in_size == [4, 8]
    assert by_name["encoder.1"].out_size == [4, 16]
    assert by_name["head"].out_size == [4, 2]
    assert summary.flops == 2 * 4 * (8 * 16 + 16 * 2)
    assert "[4, 16]" in str(summary)


def test_the_example_leaves_modes_buffers_gradients_and_random_numbers_alone() -> None:
    net = Net(torch.randn(4, 8))
    net.encoder[1].eval()
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    state = torch.get_rng_state()
    summary = summarize(net)
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training
    assert not net.encoder[1].training
    assert net.encoder[2].training
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in net.named_buffers())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert (summary.num_training, summary.num_eval) == (4, 1)
    assert not net.encoder._forward_hooks


def test_an_example_that_does_not_fit_is_a_warning_that_names_it() -> None:
    with pytest.warns(UserWarning, match=r"Net\.example_input_array does not match its forward \(RuntimeError"):
        summary = summarize(Net(torch.randn(4, 9)))
    assert summary.flops is None
    assert summary.layers[0].out_size is None


def test_lazy_parameters_are_marked_and_not_initialized() -> None:
    net = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    summary = summarize(net, example_input=torch.randn(2, 5))
    assert summary.layers[0].is_lazy
    assert summary.total_parameters == 4
    assert "0+?" in str(summary)
    assert isinstance(net[0], nn.LazyLinear)


def test_a_module_without_parts_or_parameters_has_a_summary() -> None:
    summary = summarize(nn.Identity())
    assert (summary.layers, summary.total_parameters) == ((), 0)
    assert "parameters in total" in str(summary)


def test_fit_prints_the_summary_in_the_precision_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"enable_model_summary": True, "max_epochs": 1, "precision": "bf16-true"}
    trainer_in(tmp_path, ModelSummary(max_depth=-1), **settings).fit(Exemplary(), batches())
    printed = capsys.readouterr().out
    assert printed.count("Linear") == 1
    assert "[4, 2]" in printed
    assert "[4, 1]" in printed


def test_a_depth_below_minus_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="`max_depth` can be -1, 0 or > 0, got -2; give the levels"):
        ModelSummary(max_depth=-2)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1 K"), (123456, "123 K"), (999_600, "1 M"), (7_240_000_000, "7.24 B")],
)
def test_numbers_have_three_digits_and_a_unit(number: int, text: str) -> None:
    assert format_count(number) == text


# --- as in Lightning 2.6.6 -------------------------------------------------------------------------------------------


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.second = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).eval()
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(1))
        self.example_input_array = torch.zeros(4, 2)

    def forward(self, x):
        return self.second(self.first(x)) * self.scale


def test_a_summary_is_an_object():
    """The numbers are those of Lightning's ModelSummary of this module."""
    summary = summarize(TwoLayers())
    assert summary.layer_names == ["first", "second", "unused"]
    assert summary.layer_types == ["Linear", "Sequential", "Linear"]
    assert summary.param_nums == [9, 10, 6]
    assert summary.in_sizes == [[4, 2], [4, 3], "?"]
    assert summary.out_sizes == [[4, 3], [4, 1], "?"]
    assert summary.training_modes == [True, False, True]
    assert summary.total_training_modes == {"train": 2, "eval": 3}
    assert (summary.total_parameters, summary.trainable_parameters) == (26, 26)
    assert summary.model_size == pytest.approx(26 * 4e-6)
    assert summary.total_flops == 2 * 4 * (2 * 3 + 3)
    assert summarize(TwoLayers(), max_depth=0).layer_names == []


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_submodule_has_no_sizes():
    module = TwoLayers()
    module.first = torch.jit.script(module.first)
    summary = summarize(module)
    assert summary.in_sizes == ["?", [4, 3], "?"]
    assert summary.param_nums == [9, 10, 6]
    assert module.first.training


@pytest.mark.parametrize("depth", ["x", 1.5, -2])
def test_another_depth_is_refused(depth):
    with pytest.raises(ConfigError, match=f"`max_depth` can be -1, 0 or > 0, got {depth}"):
        ModelSummary(max_depth=depth)


def test_what_the_forward_counts_is_as_before() -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__(torch.randn(4, 8))
            self.calls: list[int] = []
            self.generator = torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            self.calls.append(len(x))
            return super().forward(x * torch.rand((), generator=self.generator))

    net = Counting()
    before = net.generator.get_state()
    assert summarize(net).layers[0].out_size == [4, 16]
    assert not net.calls
    assert torch.equal(net.generator.get_state(), before)
