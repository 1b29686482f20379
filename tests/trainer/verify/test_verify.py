"""`verify` passes what is equal, and finds faults that were put in on purpose, with the part they are in."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from faulty import FAULTS, CountsPositions, Sound, data
from small import raises
from sweep import IS_SWEEP
from torch import nn
from torch.utils.data import DataLoader, Dataset

from echelon import (
    Callback,
    ConfigError,
    DeviceMapStrategy,
    LocalSGDStrategy,
    ModelCheckpoint,
    ParallelStrategy,
    ParameterServerStrategy,
    RemoteEmbedding,
)
from echelon.strategies.placement import BY_NAME
from echelon.testing import Layout, verify
from echelon.trainer.cli.main import main


class Shaken(Dataset):
    """Samples that are transformed at random each time they are read."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.linspace(-1, 1, 4) * (index + 1) / 40 + torch.rand(4) / 10
        return x, x.sum(0, keepdim=True)


class Planned(Sound):
    """Without a fault, with dropout, and with a plan for tensor parallelism."""

    tp_plan: ClassVar = {"first": "colwise", "last": "rowwise"}

    def __init__(self):
        super().__init__()
        self.middle = nn.Dropout(0.3)

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.1)


class Whole(CountsPositions):
    def __init__(self):
        super().__init__()
        self.middle = nn.LayerNorm(8)


LAYOUTS = [
    *("single", "dp", "ddp", "zero", "fsdp", "hsdp", "tp", "elastic", "ps", "pp"),
    Layout(LocalSGDStrategy(warmup_steps=50), 2, "local_sgd"),
    Layout(DeviceMapStrategy({"first": "cpu:0", "": "cpu"}), 1),
    Layout("ddp", 3),
    Layout(ParameterServerStrategy(2), 3),
]


class SetsTheRate(Callback):
    """A user's callback; it changes every step in the same way."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.01 / (1 + trainer.global_step)


def test_every_strategy_is_the_same():
    settings = {"callbacks": [SetsTheRate(), ModelCheckpoint()], "gradient_clip_val": 0.05}
    module = Planned()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    loaders = DataLoader(Shaken(), 8, shuffle=True), data(Sound)[1]
    report = verify(module, loaders, LAYOUTS, steps=2, settings=settings)
    report.check()
    assert {layout if isinstance(layout, str) else layout.name.split(" ")[0] for layout in LAYOUTS} >= set(BY_NAME)
    assert report.global_batch_size == 7
    for comparison in report.comparisons[:-1]:
        assert all(value < 1e-12 for kind, value in comparison.largest.items() if kind != "metrics"), str(report)
        assert set(comparison.largest) == {*report.comparisons[0].largest}
    assert set(report.comparisons[-1].largest) == {"checkpoint"}, "one process loads the last checkpoint"
    assert any("dropout switched off in middle" in note for note in report.notes)
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in weights.items())


def test_two_optimizers_by_hand_are_the_same():
    class ByHand(Sound):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
                optimizer.step()

        def configure_optimizers(self):
            return torch.optim.Adam(self.first.parameters()), torch.optim.SGD(self.last.parameters(), lr=0.1)

    report = verify(ByHand(), data(ByHand), [Layout("ddp", 2), Layout("fsdp", 3)], steps=1)
    report.check()
    assert report.global_batch_size == 12 and set(report.comparisons[0].largest) >= {"gradients", "parameters"}


class Tabled(CountsPositions):
    """Tables on a server, one of which gets sparse gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.middle = RemoteEmbedding(12, 8), nn.LayerNorm(8)
        self.second = RemoteEmbedding(12, 8, sparse=True)

    def training_step(self, batch, batch_idx):
        x, y = batch
        mixed = self.last(self.middle(self.first(x) + self.second(x)))
        return nn.functional.cross_entropy(mixed.flatten(0, 1), y.flatten())

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.parameters(), lr=0.1)


class Block(nn.Module):
    """A layer with a buffer that is the same on every rank."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.tensor(0.5))

    def forward(self, x):
        return x + self.calls * self.layer(x).tanh()


class Stacked(Sound):
    """Blocks for four stages, with buffers, and a parameter that two stages use."""

    def __init__(self):
        super().__init__()
        del self.middle
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].layer.weight = self.blocks[0].layer.weight

    def configure_pipeline(self, num_stages):
        stages = [[f"blocks.{i}" for i in range(4) if i * num_stages // 4 == stage] for stage in range(num_stages)]
        return [["first", *stages[0]], *stages[1:-1], [*stages[-1], "last"]]

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@pytest.mark.only_in_sweep
@pytest.mark.sweep
def test_stages_of_each_schedule_are_the_same():
    schedules = ("gpipe", "interleaved_1f1b", "dualpipe_v") if IS_SWEEP else ("dualpipe_v",)
    layouts = [Layout(ParallelStrategy(pp=2, schedule=name), 2, name) for name in schedules]
    layouts.append(Layout(ParallelStrategy(pp=2, dp_shard=2), 4, "pp 2 x fsdp 2"))
    report = verify(Stacked(), data(Sound), layouts, steps=2, settings={"gradient_clip_val": 0.05})
    report.check()
    for one in report.comparisons[:-1]:
        assert set(one.largest) == {*report.comparisons[0].largest} >= {"gradients", "parameters", "metrics"}


def test_tables_on_a_server_are_the_same():
    layouts = [Layout(ParameterServerStrategy(dense="ddp"), 2), Layout("single", 1)]
    report = verify(Tabled(), data(CountsPositions), layouts, steps=2)
    report.check()
    assert all(set(one.largest) >= {"gradients", "parameters", "checkpoint"} for one in report.comparisons[:-1])


def test_parts_of_sequences_are_the_same():
    verify(Whole(), data(CountsPositions), [Layout(ParallelStrategy(cp=2), 2)], steps=1).check()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("module", "layout", "part", "word"),
    FAULTS,
    ids=[f"{kind.__name__}, {getattr(place, 'name', place)}" for kind, place, *_ in FAULTS],
)
def test_a_fault_is_found_with_the_part_that_it_is_in(module, layout, part, word):
    report = verify(module(), data(module), [layout], steps=2)
    [comparison] = report.comparisons
    assert not report.is_same and comparison.finding is not None
    assert comparison.finding.module == part, str(report)
    assert word in str(report)
    json.dumps(report.as_json(), allow_nan=False)
    with pytest.raises(AssertionError, match=re.escape(comparison.finding.text)):
        report.check()


def test_what_ranks_name_is_the_first_in_call_order():
    """Two faults: the one that is called first is named, though the other was registered first."""

    class Two(Sound):
        def __init__(self):
            super().__init__()
            self.late, self.early = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

        def forward(self, x):
            return self.last(self.late(self.early(self.first(x)).tanh()))

    finding = verify(Two(), data(Two), ["ddp"], steps=1).comparisons[0].finding
    assert finding is not None and (finding.module, finding.step) == ("early", 1)
    frozen = verify(Two(), data(Two), ["ddp"], steps=1, freeze_batchnorm=True)
    frozen.check()
    assert "batch statistics switched off in late, early" in frozen.notes


def test_a_step_that_fails_on_ranks_alone_is_a_finding():
    class Fails(Sound):
        def training_step(self, batch, batch_idx):
            if self.trainer.strategy.rank == 1:
                raise ValueError("no such thing")
            return super().training_step(batch, batch_idx)

    report = verify(Fails(), data(Fails), ["ddp"], steps=1)
    finding = report.comparisons[0].finding
    assert (
        finding is not None and finding.kind == "error" and "no such thing" in str(report) and "rank 1" in str(report)
    )


def test_what_a_module_computes_in_float32_is_rounding():
    class Rounds(Sound):
        def training_step(self, batch, batch_idx):
            return nn.functional.mse_loss(self(batch[0]).float(), batch[1].float())

    report = verify(Rounds(), data(Rounds), ["ddp:3"], steps=1)
    assert report.is_same and report.comparisons[0].largest["loss"] > 1e-9, str(report)
    assert any("(return nn.functional.mse_loss(self(batch[0]).float()" in note for note in report.notes)
    assert not verify(Rounds(), data(Rounds), ["ddp:3"], steps=1, tolerance=1e-9).is_same


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"strategies": "ddpp"}, ["strategies='ddpp' is not a known strategy", "Did you mean 'ddp'?"]),
        ({"strategies": ""}, ["strategies must name at least one"]),
        ({"strategies": "ddp:two"}, ["'ddp:two'", "must be a number", "ddp:4"]),
        ({"strategies": "ddp,ddp"}, ["must differ", "'ddp x 2' twice"]),
        (
            {"strategies": [ParameterServerStrategy(mode="async", max_staleness=3)]},
            ["must take the steps of one process, got 'ps'", "3 step(s) ahead", "mode='sync'"],
        ),
        ({"strategies": "ddp:0"}, ["ranks must be a number from 1", "got 0"]),
        ({"steps": 0}, ["steps must be a number from 1", "got 0"]),
        ({"tolerance": 2}, ["tolerance must be between", "got 2"]),
        ({"devices": "tpu"}, ["devices must be a type of device that torch has", "'tpu'"]),
        ({"settings": {"max_epochs": 2}}, ["max_epochs=2", "verify sets itself"]),
        ({"data": ([],)}, ["pair", "got 1"]),
    ],
)
def test_bad_input_is_refused_before_anything_starts(given, parts):
    given = {"data": data(Sound), **given}
    with raises(ConfigError, *parts):
        verify(Sound(), given.pop("data"), **given)


def test_data_without_indices_is_refused():
    ready_made = DataLoader([[torch.ones(2, 4), torch.ones(2, 1)]] * 8, batch_size=None)
    with raises(ConfigError, "one DataLoader that batches samples by index"):
        verify(Sound(), ready_made, ["ddp"])


def test_devices_that_are_not_here_are_refused():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA devices")
    with raises(ConfigError, "devices='cuda' with 2 ranks", "has 0 of them"):
        verify(Sound(), data(Sound), ["ddp"], devices="cuda")


@pytest.mark.gpu
def test_one_process_on_a_gpu_is_the_same():
    verify(Sound(), data(Sound), ["ddp:1", "fsdp:1"], devices="cuda", steps=1).check()


def test_the_command_prints_a_report_and_says_by_its_exit_code(tmp_path, capfd, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (tmp_path / "net.py").write_text(
        "import faulty, echelon\n"
        "class Data(echelon.DataModule):\n"
        "    def train_dataloader(self):\n        return faulty.data(faulty.Sound)[0]\n"
    )
    (tmp_path / "c.yaml").write_text(
        "trainer: {max_epochs: 3, strategy: zero, devices: 2, gradient_clip_val: 0.1}\n"
        "module: {_target_: faulty.Sound}\ndata: {_target_: net.Data}\n"
    )
    words = ["verify", str(tmp_path / "c.yaml"), "--steps", "1"]
    assert main([*words, "--strategies", "config", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["is_same"] and report["comparisons"][0]["layout"] == "the config's, x 2"
    assert main([*words, "--strategies", "ddp", "module._target_=faulty.DoublesAGradient"]) == 1
    out = capfd.readouterr()
    assert "DIFFERS" in out.out and "'last.weight'" in out.out and "echelon: ddp x 2" in out.err
    text = (tmp_path / "c.yaml").read_text()
    (tmp_path / "c.yaml").write_text(text.replace("strategy: zero, ", ""))
    assert main([*words, "--strategies", "config"]) == 2
    assert "trainer.strategy is None" in capfd.readouterr().err


def test_layouts_have_names_and_processes():
    assert (Layout("single", 4).ranks, Layout("dp", 3).num_processes, Layout("ddp", 3).num_processes) == (1, 1, 3)
    assert replace(Layout("ddp", 3), name="mine").name == "mine"
