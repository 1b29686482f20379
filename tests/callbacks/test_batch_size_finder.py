"""BatchSizeFinder finds the largest micro-batch under a real memory limit, with the same optimizer steps."""

from __future__ import annotations

import ctypes
import resource
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch
from small import Regression, loader, quiet, raises, samples
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from echelon import (
    BatchSizeFinder,
    Callback,
    ConfigError,
    DataModule,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModuleError,
    RunError,
    Trainer,
)
from echelon.testing import run_ranks

mpl.use("Agg")

WIDTH = 20_000
_MMAP_THRESHOLD = -3
"""The number of this parameter of glibc's ``mallopt``."""
"""Of a layer whose outputs, 320 kB a sample with their gradients, decide what fits."""


class Wide(Regression):
    """Its hidden layer needs memory for each sample; notes where it was validated."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)).double()
        self.batch_size = 4
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(batch[0].double()), batch[1].double())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(self.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6, momentum=0.9)


def fit(
    folder: Path, *callbacks: Callback, width: int = 8, kind: type[Wide] = Wide, **settings: Any
) -> tuple[Any, Trainer]:
    torch.manual_seed(3)
    module = kind(width)
    trainer = quiet(folder, callbacks=list(callbacks), **{"max_epochs": 2, **settings})
    trainer.fit(module, loader(100, 4, shuffle=True), loader(4))
    return module, trainer


def difference(one: Any, other: Any) -> float:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


class Lifts(Callback):
    """Lifts the limit after the search: in so small a heap, gaps decide by chance whether the same size fits again."""

    def __init__(self, limits: tuple[int, int]) -> None:
        self.limits = limits

    def on_train_start(self, trainer: Any, module: nn.Module) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self.limits)


def search_with_little_memory(folder: Path) -> tuple[list[dict[str, Any]], int, int, dict[str, Any]]:
    """Fit with a limit on the memory that this process may add; return what was found, and the weights."""
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**16)  # freed memory is returned, without random fragmentation
    fit(folder, width=64, max_steps=2)  # what is imported at first use
    held = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (held + 40 * 2**20, limits[1]))
    finder = BatchSizeFinder(mode="binsearch", steps_per_trial=1)
    module, trainer = fit(folder, finder, Lifts(limits), width=WIDTH, global_batch_size=100, max_steps=2)
    assert trainer.global_step == 2 and finder.optimal_batch_size is not None
    return finder.trials, finder.optimal_batch_size, module.batch_size, module.state_dict()


def test_the_largest_size_that_a_limit_of_memory_leaves_is_found(tmp_path: Path) -> None:
    ((trials, size, attribute, weights),) = run_ranks(partial(search_with_little_memory, tmp_path), 1)
    sizes = [trial["size"] for trial in trials]
    fitting, too_large = ([trial["size"] for trial in trials if trial["fits"] is fits] for fits in (True, False))
    assert sizes[:3] == [2, 4, 8] and attribute == size
    assert (
        too_large and size < min(too_large) <= 100
    )  # a step of one micro-batch needs 32 MB for the hidden layer alone
    assert size in fitting and sizes[-1] == size >= 8
    whole, _ = fit(tmp_path, width=WIDTH, global_batch_size=100, max_steps=2)
    pairs = zip(whole.state_dict().values(), weights.values(), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-12


CASES: list[dict[str, Any]] = [
    {"global_batch_size": 32},
    {"accumulate_grad_batches": 8, "val_check_interval": 11, "gradient_clip_val": 0.1},
    {"accumulate_grad_batches": 8, "limit_train_batches": 16, "val_check_interval": 0.5},
    {"accumulate_grad_batches": 2, "check_val_every_n_epoch": None, "val_check_interval": 7},
]


@pytest.mark.parametrize("settings", CASES)
def test_the_steps_and_validations_stay_the_same(tmp_path: Path, settings: dict[str, Any]) -> None:
    finder = BatchSizeFinder(max_val=16)
    module, trainer = fit(tmp_path, finder, **settings)
    plain, plain_trainer = fit(tmp_path, **settings)
    assert finder.optimal_batch_size == min(16, 4 * settings.get("accumulate_grad_batches", 8))
    assert trainer.global_step == plain_trainer.global_step and trainer.samples_seen == plain_trainer.samples_seen
    assert trainer.num_training_batches < plain_trainer.num_training_batches
    assert module.validated == plain.validated and len(plain.validated) > 1
    assert difference(module, plain) < 1e-12


@pytest.mark.parametrize("at", ["epoch=0-*", "*step=5.ckpt"])
def test_a_resumed_run_has_the_size_of_its_checkpoint(tmp_path: Path, at: str, capsys: Any) -> None:
    settings: dict[str, Any] = {"accumulate_grad_batches": 8}
    saver = ModelCheckpoint(tmp_path / "saved", save_top_k=-1, monitor="step", mode="max", every_n_train_steps=1)
    checkpoints = {"enable_checkpointing": True}
    whole, _ = fit(tmp_path, BatchSizeFinder(max_val=16), saver, **settings, **checkpoints)
    finder = BatchSizeFinder(max_val=2)
    torch.manual_seed(3)
    module = Wide(8)
    path = max((tmp_path / "saved").glob(at))
    trainer = quiet(tmp_path, callbacks=[finder], max_epochs=2, **settings)
    capsys.readouterr()
    trainer.fit(module, loader(100, 4, shuffle=True), loader(4), ckpt_path=path)
    assert capsys.readouterr().out == "" and finder.optimal_batch_size == 16
    assert difference(module, whole) == 0.0
    with_its_own = quiet(tmp_path, max_epochs=2, **settings)  # and without the callback, the loader's
    module = Wide(8)
    with_its_own.fit(module, loader(100, 4, shuffle=True), loader(4), ckpt_path=path)
    assert difference(module, whole) < 1e-12


def test_a_data_module_gets_the_size_and_checkpoints_keep_the_configured_one(tmp_path: Path) -> None:
    class Data(DataModule):
        def __init__(self, bs: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return DataLoader(samples(64), self.hparams.bs)

    data, finder = Data(), BatchSizeFinder(batch_arg_name="bs")
    trainer = quiet(tmp_path, callbacks=[finder], accumulate_grad_batches=3, max_epochs=1, enable_checkpointing=True)
    trainer.fit(Wide(8), datamodule=data)
    assert data.hparams.bs == finder.optimal_batch_size == 12 and trainer.global_step == 6
    assert Data.load_from_checkpoint(trainer.checkpoint_callback.best_model_path).hparams.bs == 4


def test_an_error_that_is_not_of_memory_is_raised_as_it_is(tmp_path: Path) -> None:
    class Fails(Wide):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ArithmeticError("other")

    with pytest.raises(ArithmeticError, match="other"):
        fit(tmp_path, BatchSizeFinder(), kind=Fails)


def test_the_plot_shows_the_speed_of_each_size(tmp_path: Path) -> None:
    finder = BatchSizeFinder()
    with raises(RunError, "found none"):
        finder.plot()
    fit(tmp_path, finder, accumulate_grad_batches=4)
    finder.trials.append({"size": 32, "fits": False, "samples_per_second": 0.0})
    (axes,) = finder.plot().axes
    assert [line.get_label() for line in axes.lines[1:]] == ["32: out of memory", "16: taken"]
    assert list(map(int, axes.lines[0].get_xdata())) == [2, 4, 8, 16]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"mode": "linear"}, ("power, binsearch", "got 'linear'")),
        ({"steps_per_trial": 0}, ("steps_per_trial", "got 0")),
        ({"init_val": 0}, ("init_val", "got 0")),
        ({"margin": 1.0}, ("margin", "got 1.0")),
    ],
)
def test_arguments_that_cannot_be_are_refused(options: Any, parts: Any) -> None:
    with raises(ConfigError, *parts):
        BatchSizeFinder(**options)


class Manual(Wide):
    automatic_optimization = False


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(samples())


@pytest.mark.parametrize(
    ("module", "callbacks", "settings", "error", "parts"),
    [
        (Manual, [BatchSizeFinder()], {}, ConfigError, ("automatic optimization",)),
        (
            Wide,
            [BatchSizeFinder()],
            {"strategy": "ddp", "devices": 2},
            ConfigError,
            ("got 2 processes", "devices=1"),
        ),
        (Wide, [BatchSizeFinder(batch_arg_name="bs")], {}, ModuleError, ("batch_arg_name='bs'", "found none")),
        (Wide, [BatchSizeFinder()], {"reload_dataloaders_every_n_epochs": 1}, ConfigError, ("one loader", "=1")),
        (Wide, [BatchSizeFinder(), GradientAccumulationScheduler({0: 2})], {}, ConfigError, ("both set", "remove one")),
        (
            Wide,
            [BatchSizeFinder()],
            {"accumulate_grad_batches": 8, "limit_train_batches": 9},
            ConfigError,
            ("limit_train_batches=9", "multiple of 8"),
        ),
    ],
)
def test_what_cannot_be_searched_is_said(
    tmp_path: Path, module: Any, callbacks: Any, settings: Any, error: Any, parts: Any
) -> None:
    with raises(error, *parts):
        fit(tmp_path, *callbacks, kind=module, **settings)


def test_data_without_samples_to_cut_is_refused(tmp_path: Path) -> None:
    trainer = quiet(tmp_path, callbacks=[BatchSizeFinder()], max_steps=1)
    with raises(ConfigError, "one DataLoader", "choose the batch size"):
        trainer.fit(Wide(8), DataLoader(Stream(), 2))
