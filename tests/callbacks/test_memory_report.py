"""The memory report: bytes that can be worked out by hand, on one process and on two."""

import contextlib
import io

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ActivationCheckpointing, ConfigError, MemoryReport, TrainModule
from echelon.strategies.fsdp import FSDPStrategy
from echelon.testing import run_ranks

WIDTH, BATCH = 64, 8
BLOCK = 8 * (WIDTH * WIDTH + WIDTH)
WHOLE = 4 * BLOCK
SCALARS = 8 * 4
"""The step counters of AdamW, one in float32 for each of 8 parameters."""


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
        optimizer.zero_grad()


def report(strategy="single", kind=Net, num_batches=4, **settings):
    """Train a few steps, of one batch on each rank; return what was reported."""
    memory = MemoryReport()
    data = TensorDataset(torch.randn(num_batches * world_size() * BATCH, WIDTH, dtype=torch.float64))
    trainer = double_trainer(strategy=strategy, max_epochs=1, callbacks=memory, **settings)
    trainer.fit(kind(), DataLoader(data, BATCH))
    return memory.measured, memory.expected


def values(parameters, gradients, optimizer):
    return {"parameters": parameters, "gradients": gradients, "optimizer state": optimizer}


def test_one_process_holds_everything(capsys):
    measured, expected = report()
    kept = measured.pop("activations")
    assert measured == expected == values(WHOLE, WHOLE, 2 * WHOLE + SCALARS)
    # the input, the output of each tanh and the loss's square
    assert kept == 5 * 8 * BATCH * WIDTH
    text = capsys.readouterr().out
    assert "Memory" in text
    assert f"{WHOLE / 1e6:.3f} MB" in text
    assert text.count("activations") == 1


def test_a_run_that_ends_before_is_reported_too():
    assert report(num_batches=1)[0]["parameters"] == WHOLE


def test_activations_that_are_computed_again_do_not_count():
    setting = ActivationCheckpointing(modules=nn.Sequential, every=5)
    assert [name for name, _ in setting.submodules(Net())] == ["net"]
    assert report(activation_checkpointing=setting)[0]["activations"] == 2 * 8 * BATCH * WIDTH


def test_micro_batches_are_measured_one_by_one():
    assert report(accumulate_grad_batches=2) == report()


def test_manual_optimization_is_measured():
    measured, expected = report(kind=Manual)
    # a step counter made inside a step has the precision's dtype
    assert measured == values(WHOLE, WHOLE, 2 * WHOLE + 2 * SCALARS) | {"activations": 5 * 8 * BATCH * WIDTH}
    assert expected == values(WHOLE, WHOLE, 2 * WHOLE + 2 * SCALARS)


def test_a_number_of_steps_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="num_steps must be 1 or more, got 0"):
        MemoryReport(0)


def summary_of_shards():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        report(FSDPStrategy(), enable_model_summary=True)
    return printed.getvalue()


def of_all():
    calm_down()
    reports = {name: report(name) for name in ("ddp", "zero")} | {"fsdp": report(FSDPStrategy())}
    return reports, summary_of_shards()


def test_two_ranks_hold_what_their_strategy_shares_out():
    (first, printed), (second, _) = run_ranks(of_all, 2)
    assert first == second
    assert f"{WHOLE / 1e6:.3f} MB  of parameters" in printed
    assert f"{WHOLE / 2e6:.3f} MB  of them on each rank" in printed
    kept = 5 * 8 * BATCH * WIDTH
    half = WHOLE // 2
    assert first["ddp"][0] == values(WHOLE, WHOLE, 2 * WHOLE + SCALARS) | {"activations": kept}
    assert first["ddp"][1] == values(WHOLE, WHOLE, 2 * WHOLE + SCALARS)
    assert first["zero"][0] == values(WHOLE, WHOLE, WHOLE + SCALARS / 2) | {"activations": kept}
    assert first["zero"][1] == pytest.approx(values(WHOLE, WHOLE, WHOLE + SCALARS / 2))
    assert first["fsdp"][0] == values(half, half, WHOLE + SCALARS) | {"activations": kept}
    assert first["fsdp"][1] == pytest.approx(values(half, half, WHOLE + SCALARS))
