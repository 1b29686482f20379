"""DataModule: the loaders of one data set, and its download and setup, in one reusable object."""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ...callbacks.run import Run
from ...common.errors import DataError
from ...strategies.distributed.nested import named_leaves, to_device
from .hparams import HyperparametersMixin, init_arguments
from .load import MapLocation, load_datamodule

Datasets = Dataset[object] | Sequence[Dataset[object]] | Mapping[str, Dataset[object]] | None

_TITLES: Final = {"train": "Train", "val": "Validation", "test": "Test", "predict": "Predict"}


class DataHooks:
    """Loaders, and hooks for moving a batch to the device, which a module and a data module can both define."""

    prepare_data_per_node: bool = True
    """Whether `prepare_data` is called on each node; set it to False if nodes share the folder."""

    def prepare_data(self) -> None:
        """Download or unpack data: called once per node, before ``setup``. Do not set attributes on ``self``."""

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
        """Return the prediction loader, or a list or dict of them."""
        raise DataError(
            f"{type(self).__name__} has no predict_dataloader; define it, or pass dataloaders= to predict()."
        )

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to move to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return the batch on the device; override for types of batches without ``.to(device)``."""
        return to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch for the step, from the batch on the device."""
        return batch


class DataModule(DataHooks, HyperparametersMixin):
    """Define `setup` and the loaders you need; names and order are Lightning's.

    `prepare_data` and `setup` run before the module's methods of the same name.

    Example::

        class Numbers(DataModule):
            def __init__(self, batch_size: int = 8):
                super().__init__()
                self.batch_size = batch_size

            def setup(self, stage):
                self.data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))

            def train_dataloader(self):
                return DataLoader(self.data, self.batch_size, shuffle=True)

        Trainer(max_epochs=1).fit(module, datamodule=Numbers())
    """

    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    """The checkpoint key of the hyper-parameters."""

    trainer: Run | None = None

    def setup(self, stage: str) -> None:
        """Build the data sets; called in every process with ``fit``, ``validate``, ``test`` or ``predict``."""

    def teardown(self, stage: str) -> None:
        """Release what `setup` built; also called after an error."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when an exception is raised in a run."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON values and tensors."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def __getattr__(self, name: str) -> Any:
        """Raise an `AttributeError` that says where the attribute is set, if `prepare_data` or `setup` sets it."""
        kind = type(self)
        text = f"{kind.__name__!r} object has no attribute {name!r}"
        if name in _set_in(kind.setup):
            text += (
                f", which {kind.__name__}.setup sets in some stage: the Trainer calls setup('fit'), 'validate', 'test' "
                "or 'predict' before it asks for loaders; to ask for them yourself, call setup first"
            )
        elif name in _set_in(kind.prepare_data):
            text += (
                f", which {kind.__name__}.prepare_data sets: that is called in one process per node, so set it in "
                "setup(stage)"
            )
        elif not name.startswith("_") and kind.setup is not DataModule.setup and self.trainer is not None:
            text += f", which neither {kind.__name__}.__init__ nor setup(stage) has set; set it in setup for this stage"
        raise AttributeError(text, name=name, obj=self)

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Datasets = None,
        val_dataset: Datasets = None,
        test_dataset: Datasets = None,
        predict_dataset: Datasets = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **datamodule_kwargs: Any,
    ) -> Self:
        """Return a data module with a plain loader for each data set; those for training shuffle.

        Args:
            train_dataset: a data set, or a list, tuple or dict of them; the other tasks accept the same.
            val_dataset: data to validate.
            test_dataset: data to test.
            predict_dataset: data to predict.
            batch_size: of every loader; also passed to the constructor, if it takes it.
            num_workers: of every loader; also passed to the constructor, if it takes it.
            datamodule_kwargs: further arguments of the constructor.
        """
        sizes = {"batch_size": batch_size, "num_workers": num_workers}
        module = cls(**init_arguments(cls, sizes), **datamodule_kwargs)
        make: Any = partial(DataLoader, batch_size=batch_size, num_workers=num_workers)
        datasets = {"train": train_dataset, "val": val_dataset, "test": test_dataset, "predict": predict_dataset}
        for kind, dataset in datasets.items():
            if dataset is not None:
                setattr(
                    module, f"{kind}_dataloader", partial(_make_loaders, dataset, make, is_training=kind == "train")
                )
        return module

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: MapLocation = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build the data module with its saved hyper-parameters (those in `kwargs` win) and load its state.

        Args:
            checkpoint_path: an Echelon checkpoint.
            map_location: ignored; a data module has no device.
            hparams_file: a YAML or CSV file with hyper-parameters that replace the saved ones.
            weights_only: ignored; a checkpoint holds no pickled objects, so loading one never runs its code.
            kwargs: arguments of the constructor that were not, or could not be, saved; unknown ones are left out.

        Raises:
            CheckpointError: if the checkpoint is missing or damaged.
        """
        module, state = load_datamodule(cls, checkpoint_path, hparams_file, kwargs)
        if state:
            module.load_state_dict(state)
        return module

    def __str__(self) -> str:
        """Return a line for each kind of loader, with the sizes of its data sets."""
        return "\n".join(f"{{{title} dataloader: {self._described(kind)}}}" for kind, title in _TITLES.items())

    def _described(self, kind: str) -> str:
        try:
            loaders = getattr(self, f"{kind}_dataloader")()
        except Exception:  # noqa: BLE001  # of the user's loaders, which may need `setup` first
            return "None"
        if isinstance(loaders, DataLoader):
            return _size_of(loaders)
        sizes = [_size_of(leaf) for _, leaf in named_leaves(loaders) if isinstance(leaf, DataLoader)]
        return " ; ".join(f"{number}. {size}" for number, size in enumerate(sizes, 1)) or "None"


def _make_loaders(datasets: object, make: Callable[..., object], *, is_training: bool) -> object:
    """Return a loader for every data set in a list, tuple or dict."""

    def loader(dataset: object) -> Any:
        return make(dataset, shuffle=is_training and not isinstance(dataset, IterableDataset))

    if isinstance(datasets, Mapping):
        return {key: loader(dataset) for key, dataset in datasets.items()}
    return [loader(dataset) for dataset in datasets] if isinstance(datasets, list | tuple) else loader(datasets)


def _set_in(method: Any) -> set[str]:
    """Return the attributes that a method sets on some object."""
    code = getattr(method, "__code__", None)
    lines = dis.get_instructions(code) if code is not None else ()
    return {str(line.argval) for line in lines if line.opname == "STORE_ATTR"}


def _size_of(loader: DataLoader[object]) -> str:
    dataset = loader.dataset
    return f"size={len(dataset) if isinstance(dataset, Sized) else 'NA'}"
