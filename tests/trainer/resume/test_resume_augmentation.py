"""A resumed epoch's random augmentation continues as if uninterrupted, however a data set is read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sweep import dealt
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from echelon import Callback, Trainer, TrainModule, seed_everything


class BySample(Dataset[Tensor]):
    """Noise on each of 12 samples."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)]) + torch.rand(1)


class ByList(BySample):
    """Noise on a whole batch at once; the indices are looked at as one list, not one by one."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return list(torch.tensor(indices[:]).float().unsqueeze(1) + torch.rand(len(indices), 1))


class ByBatch(BySample):
    """Ready-made batches of 3."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(3.0).unsqueeze(1) + 3 * index + torch.rand(3, 1)


class Noting(TrainModule):
    """Keeps what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.read: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.read.append(batch.flatten().tolist())
        return (self.weight * batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class SavingAt(Callback):
    """Saves at one step."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(loader: DataLoader[Any], *callbacks: Callback, **arguments: Any) -> list[list[float]]:
    module = Noting()
    trainer = Trainer(
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(module, loader, **arguments)
    return module.read


READ = [(BySample(), 3, 0), (BySample(), 3, 2), (ByList(), 3, 0), (ByList(), 3, 2), (ByBatch(), None, 0)]
"""Data sets, sizes of batches and numbers of workers."""


@pytest.mark.sweep
@pytest.mark.parametrize(("read", "step"), dealt(READ, [2, 4, 5], [0]))
def test_the_noise_after_a_resume_is_that_of_an_undisturbed_run(
    tmp_path: Path, read: tuple[Dataset[Any], int | None, int], step: int
) -> None:
    dataset, batch_size, num_workers = read
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, num_workers=num_workers)
    seed_everything(7, verbose=False)
    whole = fit(loader, SavingAt(step, tmp_path / "a.ckpt"))
    seed_everything(8, verbose=False)
    rest = fit(loader, ckpt_path=tmp_path / "a.ckpt")
    assert rest == whole[step:]
    assert len({tuple(batch) for batch in whole}) == len(whole) == 8


@pytest.mark.parametrize("dataset", [BySample(), ByList()])
def test_workers_draw_the_same_noise_as_the_process_itself(dataset: Dataset[Any]) -> None:
    def read(num_workers: int) -> list[list[float]]:
        seed_everything(7, verbose=False)
        return fit(DataLoader(dataset, batch_size=3, shuffle=True, num_workers=num_workers))

    if isinstance(dataset, ByList):
        assert read(1) == read(2)
    else:
        assert read(0) == read(1) == read(2)
