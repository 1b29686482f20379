"""bitsandbytes: its 8-bit optimizers and 4-bit layers resume bit for bit where they run, and are refused elsewhere."""

from pathlib import Path

import pytest
import torch
from sweep import IS_SWEEP
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.common.errors import CheckpointError, ConfigError
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load

bnb = pytest.importorskip("bitsandbytes")

OPTIMIZERS = ("AdamW8bit", "Lion8bit")


class EightBit(echelon.TrainModule):
    """Trains with an optimizer whose states have 8 bits, for weights that are large enough."""

    def __init__(self, optimizer):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 80), nn.ReLU(), nn.Linear(80, 64))
        self.optimizer = optimizer

    def training_step(self, batch):
        return (self.net(batch[0]) - 1).square().mean()

    def configure_optimizers(self):
        return getattr(bnb.optim, self.optimizer)(self.parameters(), lr=1e-2)


class FourBit(echelon.TrainModule):
    """Trains an adapter beside a frozen layer of 4 bits."""

    def __init__(self, kind="nf4"):
        super().__init__()
        torch.manual_seed(0)
        self.base = bnb.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type=kind).to("cpu")
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def training_step(self, batch):
        return (self.base(batch[0]) + self.up(self.down(batch[0])) - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.1)


def fit(module, folder, steps, strategy="single", ckpt_path=None):
    """Train and return the weights; a checkpoint is left after each 3 steps."""
    data = TensorDataset(torch.randn(24, 64, generator=torch.Generator().manual_seed(1)))
    saves = echelon.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = echelon.Trainer(
        strategy=strategy, max_steps=steps, global_batch_size=4, callbacks=[saves], default_root_dir=folder, **quiet
    )
    trainer.fit(module, DataLoader(data, 2), ckpt_path=ckpt_path)
    return trainer.strategy.full_model_state()


def saved_at(folder, step):
    return next(path for path in Path(folder).iterdir() if path.name == f"step={step}.ckpt")


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def everything(folder, optimizer):
    """Return, by layout, whether a resumed run ended with the same bits; on two ranks."""
    torch.set_num_threads(1)
    found = {}
    for strategy in ("ddp", "zero"):
        for name, make in {"8 bits": lambda: EightBit(optimizer), "4 bits": FourBit}.items():
            own = folder / f"{strategy} {name}"
            whole = fit(make(), own, 6, strategy)
            resumed = fit(make(), folder / "resumed" / own.name, 6, strategy, saved_at(own, 3))
            found[strategy, name] = same(whole, resumed)
    sharded = fit(FourBit(), folder / "fsdp", 6, "fsdp")
    resumed = fit(FourBit(), folder / "fsdp resumed", 6, "fsdp", saved_at(folder / "fsdp", 3))
    found["fsdp", "4 bits"] = same(sharded, resumed)
    weights = [f"{name}.weight" for name in ("up", "down") if sharded]  # on the first rank
    found["fsdp", "close"] = max((float((sharded[n] - whole[n]).abs().max()) for n in weights), default=0.0)
    try:
        fit(EightBit(optimizer), folder / "refused", 3, "fsdp")
    except ConfigError as error:
        found["fsdp", "8 bits"] = str(error)
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", OPTIMIZERS if IS_SWEEP else OPTIMIZERS[:1])
def test_states_of_8_bits_and_layers_of_4_resume_to_the_bit_or_are_refused_by_name(optimizer, tmp_path):
    for found in run_ranks(everything, 2, tmp_path, optimizer, timeout=500):
        refusal = found.pop(("fsdp", "8 bits"))
        assert f"shards parameters, but {optimizer} fails on shards" in refusal and "strategy='zero'" in refusal
        assert found.pop(("fsdp", "close")) < 1e-5
        assert found == dict.fromkeys(found, True)
    # what two ranks of zero have saved is continued by one process, with the states still of 8 bits
    states = load(saved_at(tmp_path / "zero 8 bits", 3))["optimizers"][0]["state"]
    assert states["net.0.weight"]["__bnb_optimizer_quant_state__"]["state1"].dtype == torch.uint8
    one = fit(EightBit(optimizer), tmp_path / "one of zero", 6, "single", saved_at(tmp_path / "zero 8 bits", 3))
    whole = fit(EightBit(optimizer), tmp_path / "single", 6)
    assert max(float((one[name] - whole[name]).abs().max()) for name in whole) < 1e-5


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_process_resumes_to_the_bit(optimizer, tmp_path):
    whole = fit(EightBit(optimizer), tmp_path, 6)
    assert same(whole, fit(EightBit(optimizer), tmp_path / "resumed", 6, ckpt_path=saved_at(tmp_path, 3)))


def test_a_layer_that_is_quantized_otherwise_is_refused_by_name(tmp_path):
    whole = fit(FourBit(), tmp_path, 6)
    assert same(whole, fit(FourBit(), tmp_path / "resumed", 6, ckpt_path=saved_at(tmp_path, 3)))
    other = FourBit()
    other.base.weight.quant_state.state2.absmax += 1  # of another base, say
    with pytest.raises(CheckpointError, match=r"base.weight.nested_absmax is quantized otherwise in the checkpoint"):
        fit(other, tmp_path / "other", 6, ckpt_path=saved_at(tmp_path, 3))
