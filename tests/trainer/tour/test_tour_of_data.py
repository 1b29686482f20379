"""A tour of mistakes in data, checkpoints and hyper-parameters. Each is answered within 15 seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet, samples
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader, Dataset, IterableDataset
from tour import Mistake, Tour

from echelon import CheckpointError, ConfigError, DataError, ModuleError, RunError, seed_everything

tour = Tour()


def fit(data: Any, **settings: Any) -> None:
    quiet(**{"max_epochs": 1, **settings}).fit(Regression(), data)


class Items(Dataset[Any]):
    """A data set of these items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        item = self.items[index]
        if isinstance(item, Exception):
            raise item
        return item


# --- loaders ---


@tour.answered_by(DataError, "TensorDataset is a dataset", "DataLoader(dataset, batch_size=...)")
def a_data_set_for_a_loader() -> None:
    fit(samples())


@tour.answered_by(DataError, "3 is not a loader", "int", "pass a DataLoader")
def a_number_for_a_loader() -> None:
    fit(3)


@tour.answered_by(DataError, "function loader", "pass a DataLoader", "or call it")
def a_function_that_makes_a_loader() -> None:
    fit(loader)


@tour.answered_by(ModuleError, "no training loader", "train_dataloader", "pass one to fit()")
def no_loader() -> None:
    fit(None)


@tour.answered_by(UserWarning, "Nothing is trained", "length 0", "drop_last")
def fewer_samples_than_a_batch() -> None:
    fit(loader(num_samples=3, batch_size=4, drop_last=True))


@tour.answered_by(DataError, "training loaders are empty", "[]")
def an_empty_list_of_loaders() -> None:
    fit([])


@tour.answered_by(DataError, "a list that holds tensors (4)", "DataLoader(batches, batch_size=None)")
def a_list_of_batches_for_loaders() -> None:
    batch = (torch.ones(2, 2), torch.ones(2, 1))
    fit([batch, batch])


@tour.answered_by(ConfigError, "['train', 'validation']", "fit(module, loaders['train'], val_dataloaders=...)")
def loaders_of_all_stages_in_one_dict() -> None:
    fit({"train": loader(), "validation": loader()})


@tour.answered_by(DataError, "no batch in epoch 1", "max_epochs=1", "iter()")
def a_generator_for_two_epochs() -> None:
    batches = ((torch.ones(2, 2), torch.ones(2, 1)) for _ in range(2))
    fit(batches, max_epochs=2)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.ones(2), torch.ones(1)


@tour.answered_by(
    UserWarning,
    "a DataLoader, has no length",
    "1000 epochs",
    "set max_epochs, max_steps, max_time or limit_train_batches",
)
def an_endless_stream_without_a_limit() -> None:
    class Stops(Regression):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = batch_idx == 3

    quiet().fit(Stops(), DataLoader(Endless(), 2))


@tour.answered_by(ConfigError, "has no length", "Trainer(limit_train_batches)", "got 0.5")
def a_fraction_of_a_stream() -> None:
    fit(DataLoader(Endless(), 2), limit_train_batches=0.5)


@tour.answered_by(RuntimeError, "[3] at entry 1", "samples [0, 1] of the training data", "collate_fn")
def ragged_samples() -> None:
    fit(DataLoader(Items((torch.ones(2), torch.ones(1)), (torch.ones(3), torch.ones(1))), 2))


@tour.answered_by(TypeError, "NoneType", "samples [0, 1] of the training data")
def a_sample_that_is_none() -> None:
    fit(DataLoader(Items((torch.ones(2), torch.ones(1)), None), 2))


@tour.answered_by(ValueError, "no picture here", "samples [0, 1] of the training data")
def a_data_set_that_raises() -> None:
    fit(DataLoader(Items((torch.ones(2), torch.ones(1)), ValueError("no picture here")), 2))


@tour.answered_by(ValueError, "no picture here", "samples [0, 1] of the training data")
def a_data_set_that_raises_in_a_worker() -> None:
    fit(DataLoader(Items((torch.ones(2), torch.ones(1)), ValueError("no picture here")), 2, num_workers=1))


@tour.answered_by(ConfigError, "global_batch_size=8", "accumulate_grad_batches")
def a_global_batch_of_ready_batches() -> None:
    fit(DataLoader(samples(), batch_size=None), global_batch_size=8)


@tour.answered_by(UserWarning, "val_dataloaders", "Unvalidated defines no validation_step")
def validation_data_without_a_step() -> None:
    class Unvalidated(Regression):
        validation_step = None  # type: ignore[assignment]

    quiet(max_epochs=1).fit(Unvalidated(), loader(), loader())


@tour.answered_by(RuntimeError, "Double and Float", "batch.float()")
def inputs_of_another_precision() -> None:
    fit(DataLoader(Items(*[(torch.ones(2).double(), torch.ones(1))] * 2), 2))


@tour.answered_by(ConfigError, "seed must be an integer", "got seed='one'")
def a_seed_in_words() -> None:
    seed_everything("one")  # type: ignore[arg-type]


# --- checkpoints ---


class Wide(Regression):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1))


def save(module: Any, name: str = "saved.ckpt", **options: Any) -> str:
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(name, **options)
    return name


@tour.answered_by(
    CheckpointError,
    "do not fit Wide",
    "build the module as it was",
    "net.0.weight: the module has (5, 2), the weights have (3, 2)",
)
def a_checkpoint_of_another_width() -> None:
    quiet(max_epochs=2).fit(Wide(5), loader(), ckpt_path=save(Wide(3)))


@tour.answered_by(
    CheckpointError,
    "do not fit Wide",
    "strict_loading = False",
    "missing (4)",
    "net.0.weight",
    "unexpected (2)",
    "net.weight",
)
def a_checkpoint_of_another_model() -> None:
    quiet(max_epochs=2).fit(Wide(), loader(), ckpt_path=save(Regression()))


@tour.answered_by(CheckpointError, "The optimizer is Adam", "'momentum'", "configure the optimizer as it was saved")
def a_checkpoint_of_another_optimizer() -> None:
    class Other(Regression):
        def configure_optimizers(self) -> Any:
            return Adam(self.parameters(), lr=0.1)

    quiet(max_epochs=2).fit(Other(), loader(), ckpt_path=save(Regression()))


@tour.answered_by(CheckpointError, "holds weights only", "load_from_checkpoint")
def weights_alone_to_resume_from() -> None:
    quiet(max_epochs=2).fit(Regression(), loader(), ckpt_path=save(Regression(), weights_only=True))


@tour.answered_by(CheckpointError, "nowhere.ckpt", "does not exist")
def a_checkpoint_that_does_not_exist() -> None:
    quiet().fit(Regression(), loader(), ckpt_path="nowhere.ckpt")


@tour.answered_by(
    ModuleError, "on the class, got an instance of Regression", "module = Regression.load_from_checkpoint"
)
def a_checkpoint_loaded_into_an_instance() -> None:
    Regression().load_from_checkpoint(save(Regression()))


@tour.answered_by(CheckpointError, "model.ckpt' is a file", "echelon.load_weights")
def a_checkpoint_of_lightning() -> None:
    torch.save({"state_dict": Regression().state_dict()}, "model.ckpt")
    quiet().fit(Regression(), loader(), ckpt_path="model.ckpt")


@tour.answered_by(CheckpointError, "empty' is not a checkpoint", "manifest.json")
def a_folder_without_a_checkpoint() -> None:
    Path("empty").mkdir()
    quiet().fit(Regression(), loader(), ckpt_path="empty")


@tour.answered_by(ConfigError, "ckpt_path='best'", "pass a path")
def the_best_checkpoint_before_a_run() -> None:
    quiet().validate(Regression(), loader(), ckpt_path="best")


@tour.answered_by(CheckpointError, "damaged", "model.safetensors")
def a_damaged_checkpoint() -> None:
    path = Path(save(Regression()))
    tensors = next(path.glob("*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:-4])
    quiet(max_epochs=2).fit(Regression(), loader(), ckpt_path=path)


@tour.answered_by(RunError, "must be a run, found None", "call fit")
def a_checkpoint_before_a_run() -> None:
    quiet().save_checkpoint("x.ckpt")


@tour.answered_by(CheckpointError, "state['fn']", "<built-in function print>", "store numbers, strings, tensors")
def a_function_in_a_checkpoint() -> None:
    class Saves(Regression):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["fn"] = print

    save(Saves())


@tour.answered_by(CheckpointError, "saved.ckpt", "exists")
def a_checkpoint_where_a_file_is() -> None:
    Path("saved.ckpt").write_text("notes")
    save(Regression())


# --- hyper-parameters ---


@tour.answered_by(UserWarning, "['activation']", "could not be stored as JSON", "pass them to load_from_checkpoint")
def a_lambda_in_the_hyperparameters() -> None:
    class Hyper(Regression):
        def __init__(self, activation: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()

    Hyper.load_from_checkpoint(save(Hyper(activation=lambda x: x)))


@tour.answered_by(
    CheckpointError,
    "Needs cannot be built with the arguments []",
    "'width'",
    "Pass what is missing to load_from_checkpoint",
)
def a_module_with_an_argument_that_was_not_saved() -> None:
    class Needs(Regression):
        def __init__(self, width: int) -> None:
            super().__init__()

    Needs.load_from_checkpoint(save(Needs(3)))


@tour.answered_by(ConfigError, "save_hyperparameters", "'widht'", "Did you mean 'width'?")
def a_misspelt_hyperparameter() -> None:
    class Hyper(Regression):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters("widht")

    Hyper()


# --- a config file ---


@pytest.mark.timeout(60)
@tour.cases
def test_a_mistake_in_data_is_answered(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mistake.check()
