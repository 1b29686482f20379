"""Image demos of Lightning: MNIST of torchvision, and a data module that splits it."""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, random_split

from ...common.local_path import local_path
from ...strategies.devices.kinds import available_types
from ..module import LightningDataModule

__all__ = ["MNIST", "MNISTDataModule"]

_FOLDER: Final = "./data"


def MNIST(*args: object, **kwargs: object) -> Any:  # noqa: N802 - Lightning's name
    """Return torchvision's data set."""
    return importlib.import_module("torchvision.datasets").MNIST(*args, **kwargs)


class MNISTDataModule(LightningDataModule):
    """MNIST: images for training, validation and test.

    Args:
        data_dir: the folder of the data set.
        val_split: how many of the training images are for validation.
        num_workers: the worker processes of each loader.
        normalize: whether to bring the values of pixels from [0, 1] to [-1, 1].
        seed: kept, and unused as in Lightning: the split is always the same.
        batch_size: the samples of each batch.
    """

    name: str = "mnist"

    def __init__(
        self,
        data_dir: str = _FOLDER,
        val_split: int = 5000,
        num_workers: int = 16,
        normalize: bool = False,
        seed: int = 42,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        self.data_dir, self.val_split, self.num_workers = str(local_path("data_dir", data_dir)), val_split, num_workers
        self.normalize, self.seed, self.batch_size = normalize, seed, batch_size

    @property
    def num_classes(self) -> int:
        """The number of digits."""
        return 10

    @property
    def default_transforms(self) -> Any:
        """The transform from an image to a tensor."""
        transforms = importlib.import_module("torchvision.transforms")
        steps = [transforms.ToTensor(), *([transforms.Normalize((0.5,), (0.5,))] if self.normalize else [])]
        return transforms.Compose(steps)

    def prepare_data(self) -> None:
        for train in (True, False):
            MNIST(self.data_dir, train=train, download=True)

    def setup(self, stage: str) -> None:
        images = MNIST(self.data_dir, train=True, download=False, transform=self.default_transforms)
        sizes = [len(images) - self.val_split, self.val_split]
        self.dataset_train, self.dataset_val = random_split(images, sizes, torch.Generator().manual_seed(42))

    def train_dataloader(self) -> Any:
        return self._loader(self.dataset_train, shuffle=True)

    def val_dataloader(self) -> Any:
        return self._loader(self.dataset_val)

    def test_dataloader(self) -> Any:
        return self._loader(MNIST(self.data_dir, train=False, download=False, transform=self.default_transforms))

    def _loader(self, images: Any, *, shuffle: bool = False) -> DataLoader[object]:
        return DataLoader(
            images,
            self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            drop_last=True,
            pin_memory=bool(available_types()),
        )
