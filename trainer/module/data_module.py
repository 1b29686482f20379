"""DataModule: the loaders of one data set, and how to get it, in one reusable object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ...callbacks.run import Run
from ...strategies.errors import DataError
from .hparams import HyperparametersMixin


class DataHooks:
    """Where data comes from and how a batch gets to the device: what a module and a data module can both define."""

    def prepare_data(self) -> None:
        """Download or unpack: called once a node, before ``setup``. Set nothing on ``self``."""

    def train_dataloader(self) -> Any:
        """Return the training loader, or a list, dict or `CombinedLoader` of them."""
        raise DataError(
            f"{type(self).__name__} has no train_dataloader; define it, or pass train_dataloaders= to fit()."
        )

    def val_dataloader(self) -> Any:
        """Return the validation loader, or a list or dict of them."""
        raise DataError(f"{type(self).__name__} has no val_dataloader; define it, or pass dataloaders= to validate().")

    def test_dataloader(self) -> Any:
        """Return the test loader, or a list or dict of them."""
        raise DataError(f"{type(self).__name__} has no test_dataloader; define it, or pass dataloaders= to test().")

    def predict_dataloader(self) -> Any:
        """Return the loader to predict, or a list or dict of them."""
        raise DataError(
            f"{type(self).__name__} has no predict_dataloader; define it, or pass dataloaders= to predict()."
        )

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch as it shall be moved to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on the device; override for batches of types that cannot ``.to(device)``."""
        raise NotImplementedError  # the strategy moves batches, unless this is overridden

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch as the step shall get it; it is on the device."""
        return batch


class DataModule(DataHooks, HyperparametersMixin):
    """Define `setup` and the loaders you need; Lightning's names and order.

    `prepare_data` and `setup` run before the module's own of the same name.
    """

    trainer: Run | None = None

    def setup(self, stage: str) -> None:
        """Build the data sets; called in every process with ``fit``, ``validate``, ``test`` or ``predict``."""

    def teardown(self, stage: str) -> None:
        """Let go of what `setup` made; also called after an error."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when anything raises."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs of the data: JSON values and tensors."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Dataset[Any] | None = None,
        val_dataset: Dataset[Any] | None = None,
        test_dataset: Dataset[Any] | None = None,
        predict_dataset: Dataset[Any] | None = None,
        *,
        batch_size: int = 1,
        num_workers: int = 0,
    ) -> Self:
        """Return a data module with a plain loader for each data set; the training one shuffles."""
        module = cls()
        datasets = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for name, dataset in datasets.items():
            if dataset is None:
                continue
            shuffle = name == "train" and not isinstance(dataset, IterableDataset)
            loader = DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, num_workers=num_workers)
            setattr(module, f"{name}_dataloader", lambda loader=loader: loader)
        return module
