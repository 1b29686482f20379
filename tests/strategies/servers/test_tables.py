"""Tables of RemoteEmbedding under several names, and uses of them that only a whole table could serve."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    ConfigError,
    ModelCheckpoint,
    ModuleError,
    ParameterServerStrategy,
    RemoteEmbedding,
    Trainer,
    TrainModule,
    seed_everything,
)


class Words(TrainModule):
    """Looks each word up twice: in one table, or in two that are one."""

    def __init__(self, kind="tied", first=0):
        super().__init__()
        self.table, self.head = RemoteEmbedding(20, 4), nn.Linear(4, 1)
        self.again = RemoteEmbedding(20, 4, sparse=True) if kind == "tied" else self.table
        self.again.weight = self.table.weight
        self.kind, self.first = kind, first

    def training_step(self, batch, batch_idx):
        loss = self.validation_step(batch, batch_idx)
        return loss + self.table.weight.square().mean() if self.kind == "decayed" else loss

    def validation_step(self, batch, batch_idx):
        ids = batch[0] - self.first
        return (self.head(self.table(ids) * self.again((ids + 1) % 20)) - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.3, momentum=0.9)


def fit(strategy, devices, make=Words, callbacks=(), **settings):
    seed_everything(5, verbose=False)
    module = make()
    ids = TensorDataset(torch.randint(1, 20, (40, 3), generator=torch.Generator().manual_seed(1)))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        precision="64-true",
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **settings},
    )
    trainer.fit(module, DataLoader(ids, 8 // devices), DataLoader(ids, 4))
    return module


@pytest.mark.parametrize("kind", ["tied", "one layer"])
def test_a_table_with_two_names_is_trained_saved_and_back_under_both(kind, tmp_path):
    alone = fit("single", 1, partial(Words, kind)).state_dict()
    saved = ModelCheckpoint(tmp_path, save_last=True)
    served = fit(ParameterServerStrategy(dense="ddp"), 2, partial(Words, kind), [saved]).state_dict()
    loaded = Words.load_from_checkpoint(tmp_path / "last.ckpt", kind=kind).state_dict()
    for name, value in alone.items():
        torch.testing.assert_close(served[name], value, rtol=0, atol=1e-12, msg=name)
        torch.testing.assert_close(loaded[name].double(), value, rtol=0, atol=1e-6, msg=name)


def test_a_gradient_of_the_whole_table_is_refused():
    with pytest.raises(ModuleError, match=r"pushes only the rows of table.weight .*got a gradient of the whole table"):
        fit(ParameterServerStrategy(dense="ddp"), 2, partial(Words, "decayed"))


def test_an_id_that_is_no_row_on_one_rank_is_what_the_caller_hears_of():
    """Rank 1 waits for rank 0 in a collective meanwhile, and nothing of it is to blame."""

    class OnOneRank(Words):
        def validation_step(self, batch, batch_idx):
            self.first = 0 if self.global_rank else 20
            return super().validation_step(batch, batch_idx)

    with pytest.raises(ModuleError, match=r"has rows 0 to 19, got id -"):
        fit("ddp", 2, OnOneRank)


class NoTable(TrainModule):
    def __init__(self, make=lambda: nn.Linear(4, 1)):
        super().__init__()
        self.layer = make()

    def training_step(self, batch, batch_idx):
        raise AssertionError

    def validation_step(self, batch, batch_idx):
        self.log("seen", float(self.layer.weight.isfinite().all()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("strategy", "make", "error", "message"),
    [
        (
            ParameterServerStrategy(dense="ddp"),
            NoTable,
            ConfigError,
            "the number of tables of RemoteEmbedding, got 1 for",
        ),
        (ParameterServerStrategy(3), NoTable, ConfigError, "at most the number of parameter tensors, got 3 for 2"),
        (
            ParameterServerStrategy(),
            partial(NoTable, partial(nn.Embedding, 4, 2, sparse=True)),
            ModuleError,
            "got a sparse one for layer.weight; give its layer sparse=False",
        ),
    ],
)
def test_what_cannot_be_served_is_known_before_any_process_starts_and_can_be_evaluated(strategy, make, error, message):
    module = make()
    module.setup = None  # would be called in each process
    with pytest.raises(error, match=message):
        fit(strategy, 2, lambda: module)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    [metrics] = trainer.validate(make(), DataLoader(torch.zeros(2, 1), 1), verbose=False)
    assert metrics == {"seen": 1.0}
