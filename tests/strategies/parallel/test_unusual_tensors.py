"""Buffers of dtypes that torch cannot send, weights in other layouts, and what is refused by name before a run."""

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from once import once
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Trainer, TrainModule, seed_everything
from echelon.common.errors import ModuleError
from echelon.testing import run_ranks

DTYPES = {"sent": torch.int32, "short": torch.int16, "unsigned": torch.uint16, "eight": torch.float8_e5m2}


class Counting(TrainModule):
    """Adds to buffers in each step what depends on the rank; torch sends only the first of them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        for name, dtype in DTYPES.items():
            self.register_buffer(name, torch.zeros(2).to(dtype))
        self.frozen = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)

    def training_step(self, batch, batch_idx):
        for name, dtype in DTYPES.items():
            buffer = getattr(self, name)
            buffer.copy_((buffer.double() + self.trainer.strategy.rank + 1).to(dtype))
        seen = torch.stack([getattr(self, name).double().mean() for name in DTYPES])
        assert (seen == seen[0]).all(), seen  # whichever rank wrote them
        return nn.functional.mse_loss(self.layer(batch[0]) * seen.mean(), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class Laid(TrainModule):
    """Has weights whose dimensions are in another order in memory."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.layer, self.out = nn.Linear(4, 6), nn.Linear(6, 1)
        self.layer.weight = nn.Parameter(torch.randn(4, 6).t())

    def training_step(self, batch, batch_idx):
        hidden = torch.tanh(self.layer(self.conv(batch[0].view(-1, 3, 5, 5)).mean((2, 3))))
        return nn.functional.mse_loss(self.out(hidden), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class LaidLate(Laid):
    """Gets its weights in the processes."""

    def __init__(self):
        TrainModule.__init__(self)

    def configure_model(self):
        if not hasattr(self, "conv"):
            built = Laid()
            self.conv, self.layer, self.out = built.conv, built.layer, built.out


def fit(module_class, size, strategy="ddp", **settings):
    seed_everything(3, verbose=False)
    module, generator = module_class(), torch.Generator().manual_seed(0)
    x, y = (torch.randn(17, each, generator=generator, dtype=torch.float64) for each in (size, 1))
    strategy = strategy if world_size() > 1 else "single"
    trainer = double_trainer(strategy=strategy, max_epochs=1, global_batch_size=8, **settings)
    trainer.fit(module, DataLoader(TensorDataset(x, y), 2, shuffle=True))
    return {name: value.double() for name, value in trainer.strategy.full_model_state().items()}


def fit_all():
    calm_down()
    found = {strategy: fit(Counting, 4, strategy) for strategy in ("ddp", "zero") if world_size() > 1}
    return {
        **found,
        "fsdp": fit(Laid, 75, "fsdp"),
        "fsdp, built late": fit(LaidLate, 75, "fsdp"),
    }


@pytest.fixture(scope="module")
def ends_of():
    return once(lambda processes: run_ranks(fit_all, processes))


@pytest.mark.parametrize("strategy", ["ddp", "zero"])
def test_buffers_that_torch_cannot_send_are_rank_0s_as_others_are(ends_of, strategy):
    first, other = (end[strategy] for end in ends_of(2))
    for name in DTYPES:
        assert first[name].tolist() == first["sent"].tolist() == other[name].tolist()
    assert torch.equal(first["layer.weight"], other["layer.weight"])


@pytest.mark.parametrize("title", ["fsdp", "fsdp, built late"])
def test_weights_in_other_layouts_train_as_in_one_process(ends_of, title):
    (alone,), (first, _) = ends_of(1), ends_of(2)
    for name, value in alone[title].items():
        assert torch.allclose(first[title][name], value, rtol=0, atol=1e-12), name


def quantized():
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore")  # of torch, for making such tensors
@pytest.mark.parametrize("strategy", ["ddp", "zero", "local_sgd", "fsdp", "hsdp", "tp", "pp"])
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("a sparse tensor", lambda: torch.eye(4).to_sparse()),
        ("a sparse tensor", lambda: torch.eye(4).to_sparse_csr()),
        ("a quantized tensor", quantized),
    ],
)
def test_buffers_that_cannot_be_sent_are_named_before_a_process_starts(strategy, kind, make):
    module = Laid()
    module.register_buffer("special", make())
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    with pytest.raises(ModuleError, match=f"special of Laid is {kind}, which strategy=") as caught:
        trainer.fit(module, DataLoader(torch.ones(4, 75), 2))
    assert not hasattr(caught.value, "__notes__")


def test_a_parameter_whose_shards_cannot_be_gathered_is_named_before_a_process_starts():
    trainer = Trainer(strategy="fsdp", accelerator="cpu", devices=2, logger=False, enable_checkpointing=False)
    with pytest.raises(ModuleError, match=r"frozen of Counting is a parameter of torch.float8_e4m3fn, of which"):
        trainer.fit(Counting(), DataLoader(torch.ones(4, 4), 2))


@pytest.mark.filterwarnings("ignore")
def test_one_process_takes_a_compressed_buffer():
    module = Counting()
    module.register_buffer("special", torch.eye(4).to_sparse_csr())
    trainer = double_trainer(max_steps=1)
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(4, 4).double(), torch.ones(4, 1).double()), 2))
    assert trainer.global_step == 1
