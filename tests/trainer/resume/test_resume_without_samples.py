"""A run goes on from just before a step in which a rank has no sample, as if it had not stopped."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from as_rank import calm_down, double_trainer, step_by_hand_on, world_size
from once import once
from sweep import dealt
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ModelCheckpoint, TrainModule, seed_everything
from echelon.testing import run_ranks

SAMPLES, GLOBAL_BATCH = 13, 4  # the fourth step of an epoch has one sample
STOP = "epoch=1-step=7.ckpt"
CASES = {
    f"{strategy}, {'by hand' if is_manual else 'automatic'}": (strategy, is_manual)
    for strategy, is_manual in dealt(["ddp", "zero", "fsdp", "local_sgd"], [False, True], [0])
}


class Small(TrainModule):
    def __init__(self, *, is_manual):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))
        self.automatic_optimization = not is_manual

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        return step_by_hand_on(self, loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(folder, strategy, *, is_manual, num_samples=SAMPLES, ckpt_path=None):
    """Train for two epochs with a checkpoint at each step; return the weights of this rank's caller."""
    seed_everything(3, verbose=False)
    module = Small(is_manual=is_manual)
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(num_samples, size, generator=generator, dtype=torch.float64) for size in (4, 1)]
    trainer = double_trainer(
        strategy=strategy,
        max_epochs=2,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)],
        default_root_dir=folder,
    )
    loader = DataLoader(TensorDataset(*draw), GLOBAL_BATCH // world_size(), shuffle=True)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer.strategy.full_model_state()


def resume_all(folder):
    """Return, for each case, whether a resumed run ends as the undisturbed one, and whether one sample can be all."""
    calm_down()
    equal = {}
    for name, (strategy, is_manual) in CASES.items():
        whole = fit(Path(folder) / name, strategy, is_manual=is_manual)
        path = str(Path(folder) / name / STOP)
        resumed = fit(Path(folder) / f"{name} again", strategy, is_manual=is_manual, ckpt_path=path)
        first = fit(Path(folder) / f"{name} first", strategy, is_manual=is_manual, num_samples=1)
        equal[name] = (
            all(torch.equal(resumed[key], value) for key, value in whole.items()),
            all(value.isfinite().all() for value in first.values()),
        )
    return equal


@pytest.fixture(scope="module")
def results():
    folder = tempfile.mkdtemp()
    yield once(lambda num_ranks: run_ranks(resume_all, num_ranks, folder))
    shutil.rmtree(folder)


@pytest.mark.sweep
@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_on_before_a_step_without_samples(results, name):
    assert [rank[name] for rank in results(2)] == [(True, True)] * 2
