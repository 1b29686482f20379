"""Modules with complex parameters and buffers train as in one process, in every precision that can hold them."""

from itertools import product
from pathlib import Path

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from sweep import dealt
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import EMAWeightAveraging, FSDPStrategy, ModelCheckpoint, TrainModule
from echelon.common.errors import ConfigError, ModuleError
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load


class Waves(TrainModule):
    """Filters spectra with complex weights; the batch is real and complex."""

    def __init__(self, optimizer="adamw"):
        super().__init__()
        torch.manual_seed(1)
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.mix = nn.Linear(8, 8)
        self.register_buffer("phase", torch.exp(1j * torch.arange(5.0)))
        self.register_buffer("mean", torch.zeros(5, dtype=torch.complex64))
        self.kind, self.seen = optimizer, set()

    def training_step(self, batch, batch_idx):
        x, spectrum = batch
        self.seen |= {("x", x.dtype), ("spectrum", spectrum.dtype)}
        x = self.mix(x)
        there = torch.fft.rfft(x.to(self.filter.real.dtype)) * self.filter * self.phase + spectrum
        with torch.no_grad():
            self.mean += there.mean(0) * 0.5
        loss = torch.fft.irfft(there).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        if self.kind == "sgd":
            return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), 0.05)


def fit(module, folder, **settings):
    generator = torch.Generator().manual_seed(2)
    data = torch.randn(16, 8, generator=generator), torch.randn(16, 5, dtype=torch.complex64, generator=generator)
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    settings = {"max_steps": 4, "enable_checkpointing": True, "global_batch_size": 4, **settings}
    callbacks = [saver, *settings.pop("callbacks", [])]
    resumed = settings.pop("resumed", None)
    trainer = double_trainer(callbacks=callbacks, **settings)
    trainer.fit(module, DataLoader(TensorDataset(*data), 4 // world_size()), ckpt_path=resumed)
    return trainer


DTYPES = {
    "64-true": (torch.float64, torch.complex128),
    "32-true": (torch.float32, torch.complex64),
    "bf16-true": (torch.bfloat16, torch.complex64),
    "bf16-mixed": (torch.float32, torch.complex64),
}


@pytest.mark.parametrize("precision", DTYPES)
def test_complex_parameters_buffers_and_batches_stay_complex(memory_path, precision):
    module, (real, kind) = Waves(), DTYPES[precision]
    imaginary = module.phase.imag.clone()
    fit(module, memory_path, precision=precision)
    assert module.mix.weight.dtype == real
    assert {module.filter.dtype, module.phase.dtype, module.mean.dtype} == {kind}
    assert module.seen == {("x", real if precision.endswith("true") else torch.float32), ("spectrum", kind)}
    assert torch.equal(module.phase.imag.float(), imaginary)
    saved = load(memory_path / "epoch=0-step=4.ckpt")
    assert torch.equal(saved["model"]["filter"], module.filter.detach())
    assert saved["optimizers"][0]["state"]["filter"]["exp_avg"].dtype == kind


def test_loss_scaling_refuses_complex_parameters_by_name(memory_path):
    with pytest.raises(ConfigError, match="16-mixed.*complex parameters filter; use 'bf16-mixed'"):
        fit(Waves(), memory_path, precision="16-mixed")


class Filter(nn.Module):
    """Complex weights in a module of their own, which fsdp gathers alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.complex64))

    def forward(self, x):
        return x * self.weight


class Apart(Waves):
    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        torch.manual_seed(1)
        self.inner, self.filter = Filter(), None

    def training_step(self, batch, batch_idx):
        x, spectrum = batch
        there = self.inner(torch.fft.rfft(self.mix(x).to(self.phase.real.dtype))) * self.phase + spectrum
        return torch.fft.irfft(there).square().mean()


def fsdp():
    return FSDPStrategy(policy=[Filter])


CASES = {
    "ddp": (Waves, lambda: "ddp"),
    "zero": (Waves, lambda: "zero"),
    "ps": (Waves, lambda: "ps"),
    "fsdp": (Apart, fsdp),
}
ON_LAYOUTS = dealt(list(CASES), ["adamw", "sgd"], [0])
CLIPPED = {"gradient_clip_val": 0.1}


def on_ranks(root):
    """Train with every strategy, stopped in the middle; return what differs from one process."""
    calm_down()
    found = {}
    for name, kind in ON_LAYOUTS:
        make, strategy = CASES[name]
        folder = Path(root) / f"{name} {kind}"
        fit(make(kind), folder, strategy=strategy(), max_steps=2, **CLIPPED)
        fit(make(kind), folder, strategy=strategy(), resumed=folder / "epoch=0-step=2.ckpt", **CLIPPED)
        one = load(Path(root) / f"{make.__name__} {kind}" / "epoch=0-step=4.ckpt")["model"]
        here = load(folder / "epoch=0-step=4.ckpt")["model"]
        # the buffer of the means is rank 0's
        found[name, kind] = max(float((one[n] - here[n]).abs().max()) for n in one if n != "mean")
    with pytest.raises(ModuleError, match=r"filter in complex128, mix.*in float64|mix.*in float64, filter"):
        fit(Waves(), root, strategy="fsdp")
    for precision in ("bf16-mixed", "bf16-true"):  # which cast what is gathered, or stored
        module = Apart()
        fit(module, f"{root}/{precision}", strategy=fsdp(), precision=precision)
        here = load(f"{root}/{precision}/epoch=0-step=4.ckpt")["model"]
        one = load(f"{root}/one {precision}/epoch=0-step=4.ckpt")["model"]
        assert here["inner.weight"].dtype == torch.complex64
        assert (here["inner.weight"] - one["inner.weight"]).abs().max() < 0.02
        assert here["inner.weight"].imag.abs().max() > 0.1
    return found


@pytest.mark.sweep
def test_complex_parameters_train_as_in_one_process_on_every_layout(memory_path):
    for make, kind in product((Waves, Apart), ("sgd", "adamw")):
        fit(make(kind), memory_path / f"{make.__name__} {kind}", **CLIPPED)
    for precision in ("bf16-mixed", "bf16-true"):
        fit(Apart(), memory_path / f"one {precision}", precision=precision)
    for found in run_ranks(on_ranks, 2, str(memory_path)):
        assert max(found.values()) < 1e-14, found


def test_an_average_of_weights_keeps_complex_ones(memory_path):
    module = Waves()
    fit(module, memory_path, callbacks=[EMAWeightAveraging(decay=0.5, use_buffers=True)])
    average = load(memory_path / "epoch=0-step=4.ckpt")
    assert average["model"]["filter"].imag.abs().max() > 0
    assert not torch.equal(average["model"]["filter"], average["trained_weights"]["filter"])
    assert average["model"]["mean"].imag.abs().max() > 0
