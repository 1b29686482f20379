"""LearningRateFinder: a fit after the search equals one from the rate it found, and says what cannot be searched."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import torch
from small import loader, quiet, raises, samples
from torch import nn
from torch.utils.data import DataLoader

from echelon import (
    Callback,
    ConfigError,
    CSVLogger,
    DataError,
    ElasticStrategy,
    LearningRateFinder,
    LocalSGDStrategy,
    ModelCheckpoint,
    ModuleError,
    ParameterServerStrategy,
    RunError,
    TrainModule,
)
from echelon.callbacks import LearningRateCurve

mpl.use("Agg")


STEPS: list[int] = []


class Meter:
    """What a user's module may count with."""

    count = 0


class Tuned(TrainModule):
    """Uses all that a step can change: buffers, dropout, optimizer state, schedules, attributes, epochs."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.seen: list[float] = []
        self.mean = torch.zeros(())
        self.optimizer: Any = None
        self.meter = Meter()
        STEPS.clear()

    def on_train_epoch_start(self) -> None:
        self.epoch_losses: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append(float(batch[1][0]))
        self.meter.count += 1
        STEPS.append(self.global_step)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
        self.epoch_losses.append(loss.detach())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        head, rest = [*self.net[-1].parameters()], [*self.net[:-1].parameters()]
        groups = [{"params": rest}, {"params": head, "lr": 2 * self.hparams.lr}]
        optimizer = self.optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        rates = [self.hparams.lr, 2 * self.hparams.lr]
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def finder(**options: Any) -> LearningRateFinder:
    return LearningRateFinder(**{"min_lr": 1e-4, "num_training_steps": 30, **options})


def fit(folder: Path, lr: float = 0.01, *callbacks: Callback, module: Any = None, **settings: Any) -> tuple[Any, Any]:
    options = {"max_epochs": 2, "logger": CSVLogger(folder), "log_every_n_steps": 1, "enable_checkpointing": True}
    saver = ModelCheckpoint(folder / "saved", save_top_k=-1, every_n_epochs=1)
    trainer = quiet(folder, callbacks=[*callbacks, saver], **{**options, **settings})
    torch.manual_seed(3)
    module = module or Tuned(lr)
    trainer.fit(module, loader(32, 4, shuffle=True))
    return module, trainer


def same(one: TrainModule, other: TrainModule) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("settings", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}])
def test_a_fit_after_the_search_is_bitwise_one_from_the_rate(tmp_path: Path, settings: Any) -> None:
    search = finder()
    module, trainer = fit(tmp_path / "searched", 0.01, search, **settings)
    rate = module.hparams.lr
    assert rate != 0.01 and search.optimal_lr is not None and search.optimal_lr.suggestion() == rate
    steps = list(STEPS)
    plain, plain_trainer = fit(tmp_path / "plain", rate, **settings)
    assert same(module, plain)
    assert module.seen == plain.seen and torch.equal(module.mean, plain.mean)
    assert module.meter.count == plain.meter.count
    assert steps == STEPS
    assert replace(trainer.counters, seconds=0.0) == replace(plain_trainer.counters, seconds=0.0)
    assert module.optimizer is trainer.optimizers[0]
    logged = [next(tmp_path.glob(f"{name}/**/metrics.csv")).read_text() for name in ("searched", "plain")]
    assert logged[0] == logged[1] and len(logged[0].splitlines()) > trainer.global_step
    names = [sorted(path.name for path in (tmp_path / name / "saved").iterdir()) for name in ("searched", "plain")]
    assert names[0] == names[1]
    loaded = Tuned.load_from_checkpoint(tmp_path / "searched" / "saved" / names[0][-1])
    assert loaded.hparams.lr == rate and same(loaded, plain)


def test_a_search_that_fails_in_a_step_leaves_all_as_it_was(tmp_path: Path) -> None:
    class Fails(Tuned):
        fails = True

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.fails and self.global_step == 5:
                raise ArithmeticError("in the search")
            return super().training_step(batch, batch_idx)

    class Caught(LearningRateFinder):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            with pytest.raises(ArithmeticError):
                super().on_fit_start(trainer, module)
            module.fails = False

    module, trainer = fit(tmp_path / "failed", 0.01, Caught(num_training_steps=30), module=Fails())
    plain, _ = fit(tmp_path / "plain", 0.01)
    assert trainer.global_step == 16 and len(module.seen) == 16
    torch.manual_seed(3)
    assert not same(module, plain)  # its module was built under another seed
    Fails.fails = False
    again, _ = fit(tmp_path / "again", module=Fails())
    assert [*again.seen] == [*plain.seen]


def test_it_can_search_when_a_later_epoch_begins(tmp_path: Path) -> None:
    class AtEpoch(LearningRateFinder):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            return

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 1:
                before = [group["initial_lr"] for group in trainer.optimizers[0].param_groups]
                state = {name: value.clone() for name, value in module.state_dict().items()}
                self.lr_find(trainer, module)
                assert all(torch.equal(value, module.state_dict()[name]) for name, value in state.items())
                after = [group["initial_lr"] for group in trainer.optimizers[0].param_groups]
                assert after[0] / before[0] == pytest.approx(after[1] / before[1]) != 1
                assert module.hparams.lr == pytest.approx(self.optimal_lr.suggestion())

    module, trainer = fit(tmp_path, 0.01, AtEpoch(min_lr=1e-4, num_training_steps=30))
    assert trainer.global_step == 16 and len(module.seen) == 16


def test_a_resumed_run_has_the_results_and_does_not_search_again(tmp_path: Path, capsys: Any) -> None:
    whole, _ = fit(tmp_path, 0.01, finder())
    search = finder()
    trainer = quiet(tmp_path / "resumed", callbacks=[search], max_epochs=2)
    module = Tuned()
    capsys.readouterr()
    trainer.fit(module, loader(32, 4, shuffle=True), ckpt_path=next((tmp_path / "saved").glob("epoch=0-*")))
    assert capsys.readouterr().out == ""
    assert search.optimal_lr is not None and search.optimal_lr.suggestion() == whole.hparams.lr
    assert same(module, whole)


def test_ranks_search_together_and_the_caller_gets_the_rate(tmp_path: Path) -> None:
    search = finder()
    module, trainer = fit(tmp_path / "searched", 0.01, search, strategy="fsdp", devices=2)
    plain, _ = fit(tmp_path / "plain", module.hparams.lr, strategy="fsdp", devices=2)
    assert search.optimal_lr is not None and module.hparams.lr == search.optimal_lr.suggestion() != 0.01
    assert same(module, plain) and trainer.global_step == 8


def test_a_module_that_does_not_use_the_attribute_gets_the_rate_in_its_groups(tmp_path: Path) -> None:
    module, trainer = fit(tmp_path, 0.01, finder(), module=Fixed())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(module.hparams.lr) != 0.5


def test_without_update_attr_it_only_measures(tmp_path: Path) -> None:
    class Nameless(Tuned):
        def __init__(self) -> None:
            super().__init__()
            del self._hparams["lr"]

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=3)

    search = finder(update_attr=False, mode="linear", early_stop_threshold=None)
    _, trainer = fit(tmp_path, 0.01, search, module=Nameless())
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5
    assert search.optimal_lr is not None
    rates = search.optimal_lr.results["lr"]
    assert len(rates) == 30 and rates[0] == 1e-4 and rates[-1] == pytest.approx(1.0)
    assert rates[2] - rates[1] == pytest.approx(rates[1] - rates[0])


def curve(losses: list[float], mode: Any = "exponential") -> LearningRateCurve:
    made = LearningRateCurve(mode, 1e-5, 1.0, len(losses))
    made.results = {"lr": [made.rate(index) for index in range(len(losses))], "loss": losses}
    return made


def test_the_suggestion_is_in_the_steepest_fifth(tmp_path: Path) -> None:
    falling = [1.0] * 20 + [1.0 - 0.05 * n for n in range(10)] + [0.55 - 0.01 * n for n in range(10)] + [2.0, math.nan]
    found = curve(falling)
    assert found.results["lr"][22] <= found.suggestion() <= found.results["lr"][27]
    assert curve([1.0] * 11).suggestion() is None
    figure = found.plot(suggest=True)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log" and len(axes.lines) == 2
    assert float(axes.lines[1].get_xdata()[0]) == found.suggestion()
    assert found.plot(ax=axes) is figure and len(axes.lines) == 3
    assert repr(pickle.loads(pickle.dumps(found)).results) == repr(found.results)
    with raises(RunError, "found none", "LearningRateFinder"):
        LearningRateCurve("linear", 1e-3, 1, 9).plot()


def test_a_loss_that_has_diverged_leaves_the_others_in_view() -> None:
    losses = [1.0 - 0.02 * n for n in range(20)]
    (axes,) = curve([*losses, 1e6]).plot().axes
    low, high = axes.get_ylim()
    assert low < min(losses) and max(losses) < high < 2.0
    (whole,) = curve([*losses, 0.8]).plot().axes
    assert whole.get_ylim()[1] > max(losses)


def test_the_search_ends_where_the_loss_grows(tmp_path: Path) -> None:
    search = finder(max_lr=1e6, num_training_steps=60)
    fit(tmp_path, 0.01, search)
    assert search.optimal_lr is not None
    losses = search.optimal_lr.results["loss"]
    assert len(losses) < 60
    assert not losses[-1] <= 4 * min(losses[:-1])
    low = LearningRateCurve("linear", 1e-3, 1, 9)  # of a negative loss the smallest is not exceeded by four times it
    for loss in (-1.0, -1.1):
        low.add(loss)
    assert not low.has_diverged(4.0)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"min_lr": 0.0}, ("min_lr", "got min_lr=0.0")),
        ({"min_lr": 1.0, "max_lr": 0.1}, ("below max_lr", "max_lr=0.1")),
        ({"num_training_steps": 1}, ("num_training_steps", "got 1")),
        ({"mode": "log"}, ("exponential", "got 'log'")),
        ({"early_stop_threshold": 1.0}, ("above 1", "got 1.0")),
    ],
)
def test_arguments_that_cannot_be_are_refused(options: Any, parts: Any) -> None:
    with raises(ConfigError, *parts):
        LearningRateFinder(**options)


class Fixed(Tuned):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Manual(Tuned):
    automatic_optimization = False


class Two(Tuned):
    def configure_optimizers(self) -> Any:
        halves = self.net[0].parameters(), self.net[-1].parameters()
        return [torch.optim.SGD(half, lr=self.hparams.lr) for half in halves]


@pytest.mark.parametrize(
    ("module", "options", "settings", "error", "parts"),
    [
        (Manual, {}, {}, ConfigError, ("automatic optimization", "Manual")),
        (Two, {}, {}, ConfigError, ("one optimizer, got 2", "Two.configure_optimizers")),
        (Tuned, {"attr_name": "rate"}, {}, ModuleError, ("rate in Tuned", "attr_name=", "update_attr=False")),
        (Tuned, {}, {"strategy": LocalSGDStrategy(), "devices": 2}, ConfigError, ("'local_sgd'", "strategy='ddp'")),
        (Tuned, {}, {"strategy": ElasticStrategy("ddp"), "devices": 2}, ConfigError, ("'elastic'", "strategy='ddp'")),
        (Tuned, {}, {"strategy": ParameterServerStrategy(), "devices": 2}, ConfigError, ("'ps'", "strategy='ddp'")),
        (Fixed, {}, {"limit_train_batches": 0}, ConfigError, ("got 0 training batches",)),
    ],
)
@pytest.mark.filterwarnings("ignore:Nothing is trained")
def test_what_cannot_be_searched_is_said(
    tmp_path: Path, module: Any, options: Any, settings: Any, error: Any, parts: Any
) -> None:
    with raises(error, *parts):
        fit(tmp_path, 0.01, finder(**options), module=module(), **settings)


def test_data_that_is_read_once_is_refused(tmp_path: Path) -> None:
    trainer = quiet(tmp_path, callbacks=[finder()], max_epochs=1)
    with raises(DataError, "list_iterator", "only once"):
        trainer.fit(Fixed(), iter(list(DataLoader(samples(), 2))))


def test_a_development_run_is_not_searched(tmp_path: Path) -> None:
    search = finder()
    trainer = quiet(tmp_path, callbacks=[search], fast_dev_run=True)
    trainer.fit(Tuned(), loader())
    assert search.optimal_lr is None


def test_steps_cannot_be_tried_inside_a_step_or_a_validation(tmp_path: Path) -> None:
    class Inside(LearningRateFinder):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            return

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.lr_find(trainer, module)

    with raises(RunError, "between two optimizer steps", "on_train_epoch_start"):
        fit(tmp_path, 0.01, Inside(), accumulate_grad_batches=2)
