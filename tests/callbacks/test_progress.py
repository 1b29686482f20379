"""The progress bar, on a real pseudo-terminal and piped: what it shows, and how often it is written."""

from __future__ import annotations

import re
import sys
import time
import types
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Scripted, batches, trainer_in
from terminal import terminal
from torch import Tensor
from torch.utils.data import IterableDataset

from echelon import Callback, CSVLogger, Trainer
from echelon.callbacks import LambdaCallback, TQDMProgressBar
from echelon.callbacks.helpers.bars import TqdmBar
from echelon.common.console import current_console, say
from echelon.common.errors import ConfigError, RunError


class Shown(Scripted):
    """Logs its loss into the bar."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("shown", loss, prog_bar=True)
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", 0.5)


class Validated(Shown):
    """Logs one metric for each validation loader."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_acc", 0.00125 if dataloader_idx else 0.25, prog_bar=True)


class Endless(IterableDataset[Tensor]):
    """Batches whose number is not known in advance."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([(torch.ones(2, 2), torch.ones(2, 1))] * 7)


def trainer_with_bar(folder: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    return trainer_in(folder, *callbacks, **{"enable_progress_bar": True, "max_epochs": 2, **settings})


def epochs_of(lines: list[str]) -> list[str]:
    return [found.group(1) for line in lines if (found := re.match(r"Epoch (\d+/\d+|\d+): ", line))]


def bars_in(lines: list[str]) -> list[str]:
    """Leave out what a fit says at its start and its end."""
    return [line for line in lines if not line.startswith(("Training on ", "Trained to step "))]


# --- in a terminal ---------------------------------------------------------------------------------------------------


def test_each_epoch_leaves_its_line_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as seen:
        trainer_with_bar(tmp_path, num_sanity_val_steps=1).fit(Shown([1.0, 1.0]), batches(), batches(4))
    assert epochs_of(bars_in(seen.screen)) == ["0/1", "1/1"]
    for line in bars_in(seen.screen):
        assert re.match(r"Epoch ./1: 100%\|█+\| 4/4 \[.*shown=[\d.e-]+\]$", line)
    assert "Validating" in seen.written
    assert "Sanity checking" in seen.written


def test_metrics_of_several_loaders_have_short_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, columns=150) as seen:
        trainer_with_bar(tmp_path, max_epochs=1).fit(Validated(), batches(), [batches(4), batches(4)])
    assert "val_acc/0=0.250, val_acc/1=1.25e-03]" in bars_in(seen.screen)[0]


def test_leave_keeps_the_bar_of_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as seen:
        trainer_with_bar(tmp_path, TQDMProgressBar(leave=True), max_epochs=3).fit(Shown(), batches(), batches(4))
    assert epochs_of(bars_in(seen.screen)) == ["0/2", "1/2", "2/2"]
    assert all("100%" in line and "4/4" in line for line in bars_in(seen.screen))


def test_a_narrow_terminal_gets_no_second_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch, columns=30) as seen:
        trainer_with_bar(tmp_path, max_epochs=1).fit(Shown(), batches(), batches(4))
    assert len(bars_in(seen.screen)) == 1
    assert len(bars_in(seen.screen)[0]) <= 30
    assert re.match(r"Epoch 0/0: 4/4, shown=[\d.e-]+$", bars_in(seen.screen)[0])


class Busy(Shown):
    """Logs many metrics into the bar."""

    num_metrics = 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for number in range(self.num_metrics):
            self.log(f"loss_{number}", 1.354, prog_bar=True)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("num_metrics", "pattern"),
    [
        (1, r"Epoch 0/0: (100%\|█+\| )?4/4 \[\d\d:\d\d<\d\d:\d\d, +[\d.]+it/s, loss_0=1.354, shown=[\d.e-]+\]$"),
        (2, r"Epoch 0/0: 4/4 \[\d\d:\d\d, loss_0=1.354, loss_1=1.354, shown=[\d.e-]+, v_num=0\]$"),
        (3, r"Epoch 0/0: 4/4, loss_0=1.354, loss_1=1.354, loss_2=1.354, shown=[\d.e-]+, v_num=0$"),
        (6, r"Epoch 0/0: 4/4, loss_0=1.354, loss_1=1.354, loss_2=1.354, loss_3=1.354, loss_4…$"),
    ],
)
def test_80_columns_show_the_metrics_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_metrics: int, pattern: str
) -> None:
    module = Busy()
    module.num_metrics = num_metrics
    logger = CSVLogger(tmp_path) if num_metrics > 1 else False
    with terminal(monkeypatch, columns=80) as seen:
        trainer_with_bar(tmp_path, max_epochs=1, logger=logger).fit(module, batches())
    assert re.match(pattern, bars_in(seen.screen)[0]), bars_in(seen.screen)
    assert len(bars_in(seen.screen)) == 1 and len(bars_in(seen.screen)[0]) <= 80


def test_many_short_epochs_leave_few_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with terminal(monkeypatch) as seen:
        trainer_with_bar(tmp_path, max_epochs=100).fit(Shown(), batches(2))
    allowed = 10 + (time.monotonic() - began) + 1
    assert 11 <= len(bars_in(seen.screen)) <= allowed
    assert epochs_of(bars_in(seen.screen))[-1] == "99/99"


def test_what_is_said_while_a_bar_is_drawn_stands_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = LambdaCallback(
        on_train_batch_end=lambda trainer, module, outputs, batch, batch_idx: say(f"said {batch_idx}")
    )
    with terminal(monkeypatch) as seen:
        trainer_with_bar(tmp_path, talk, max_epochs=1).fit(Shown(), batches())
    assert bars_in(seen.screen)[:4] == ["said 0", "said 1", "said 2", "said 3"]
    assert len(bars_in(seen.screen)) == 5
    assert "4/4" in bars_in(seen.screen)[4]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_bar_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def interrupt(trainer: object, module: object, outputs: object, batch: object, batch_idx: int) -> None:
        if batch_idx == 2:
            raise error("enough")

    trainer = trainer_with_bar(tmp_path, LambdaCallback(on_train_batch_end=interrupt))
    with terminal(monkeypatch) as seen:
        with pytest.raises(error):
            trainer.fit(Shown(), batches())
        print("afterwards")
    assert len(bars_in(seen.screen)) == 2
    assert re.match(r"Epoch 0/1: .* 2/4 |Epoch 0/1: .* 3/4 ", bars_in(seen.screen)[0])
    assert bars_in(seen.screen)[1] == "afterwards"


def test_a_second_fit_draws_again_after_an_interrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    bar = TQDMProgressBar()
    with terminal(monkeypatch) as seen:
        with pytest.raises(KeyboardInterrupt):
            trainer_with_bar(tmp_path, bar, LambdaCallback(on_validation_batch_end=interrupt)).fit(
                Shown(), batches(), batches(4)
            )
        trainer_with_bar(tmp_path, bar, max_epochs=1).fit(Shown(), batches())
    assert [line[:10] for line in bars_in(seen.screen)] == ["Epoch 0/1:", "Epoch 0/0:"]
    assert all("4/4" in line for line in bars_in(seen.screen))


def test_an_unknown_length_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as seen:
        loader = torch.utils.data.DataLoader(Endless(), batch_size=None)
        trainer_with_bar(tmp_path, max_epochs=1).fit(Shown(), loader)
    assert len(bars_in(seen.screen)) == 1
    assert "Epoch 0/0: 7it [" in bars_in(seen.screen)[0]


@pytest.mark.parametrize("task", ["validate", "fit"])
def test_loaders_of_unknown_length_are_counted_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    loaders = [torch.utils.data.DataLoader(Endless(), batch_size=None) for _ in range(2)]
    with terminal(monkeypatch) as seen:
        trainer = trainer_with_bar(tmp_path, max_epochs=1)
        if task == "fit":
            trainer.fit(Validated(), batches(), loaders)
        else:
            trainer.validate(Validated(), loaders)
    if task == "validate":
        assert "Validating: 14it [" in bars_in(seen.screen)[0]
    assert "Validating" in seen.written


def test_users_change_the_look_of_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Lightning 2.6.6."""

    class Own(TQDMProgressBar):
        def init_train_tqdm(self) -> Any:
            bar = super().init_train_tqdm()
            bar.unit = "step"
            return bar

        def init_validation_tqdm(self) -> Any:
            bar = super().init_validation_tqdm()
            bar.bar_format = "validating with my bar"
            return bar

        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            assert self.train_progress_bar.total == 4

        def on_validation_batch_end(self, *args: Any) -> None:
            super().on_validation_batch_end(*args)
            assert self.val_progress_bar.total == 2

    bar = Own(refresh_rate=2)
    assert (bar.refresh_rate, bar.is_enabled, bar.is_disabled) == (2, True, False)
    with terminal(monkeypatch) as seen:
        trainer_with_bar(tmp_path, bar, max_epochs=1).fit(Shown(), batches(), batches(4))
    assert "step/s" in bars_in(seen.screen)[0]
    assert "validating with my bar" in seen.written
    with pytest.raises(RunError, match=r"train_progress_bar is not shown, found None"):
        bar.train_progress_bar  # noqa: B018


def test_a_disabled_bar_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = TQDMProgressBar()
    bar.disable()
    assert bar.is_disabled
    with terminal(monkeypatch) as seen:
        trainer_with_bar(tmp_path, bar).fit(Shown(), batches())
    assert seen.written == ""
    bar.enable()
    assert bar.is_enabled


def test_two_bars_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="multiple progress bar callbacks, .* at most 1 progress bar, got 2"):
        trainer_in(tmp_path, TQDMProgressBar(), TQDMProgressBar())


def test_a_resumed_epoch_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_in(tmp_path, max_epochs=1, max_steps=3)
    trainer.fit(Shown(), batches())
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    with terminal(monkeypatch) as seen:
        trainer_with_bar(tmp_path, max_epochs=1).fit(Shown(), batches(), ckpt_path=tmp_path / "middle.ckpt")
    counts = re.findall(r"(\d+)/4", seen.written)
    assert counts[0] == "3"
    assert counts[-1] == "4"
    assert "0/4" not in seen.written


def test_evaluations_leave_their_bar_and_predictions_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_with_bar(tmp_path)
    with terminal(monkeypatch) as seen:
        trainer.validate(Scripted(), [batches(4), batches(8)])
        trainer.test(Shown(), batches(4))
        trainer.predict(Predicting(), batches(4))
    bars = [line.split(":")[0] + line.split("|")[2].split("[")[0] for line in bars_in(seen.screen) if "%|" in line]
    assert bars == ["Validating 6/6 ", "Testing 2/2 ", "Predicting 2/2 "]


class Predicting(Scripted):
    """Predicts something."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


# --- how often -------------------------------------------------------------------------------------------------------


class Counting(TQDMProgressBar):
    """Counts how often metrics are read."""

    reads = 0

    def get_metrics(self, trainer: Any, module: Any) -> dict[str, float | str]:
        self.reads += 1
        return {"own": "metric"}


def test_metrics_are_read_only_for_a_redraw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bar = Counting()
    began = time.monotonic()
    with terminal(monkeypatch) as seen:
        trainer_with_bar(tmp_path, bar, max_epochs=1).fit(Shown(), batches(1000))
    redraws = (time.monotonic() - began) / TqdmBar.interval
    assert 1 <= bar.reads <= redraws + 4
    assert "500/500" in bars_in(seen.screen)[-1]
    assert "own=metric" in bars_in(seen.screen)[-1]


def test_refresh_rate_is_a_multiple_of_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TqdmBar, "interval", 0.0)
    with terminal(monkeypatch) as seen:
        trainer_with_bar(tmp_path, TQDMProgressBar(refresh_rate=3), max_epochs=1).fit(Shown(), batches(16))
    assert list(dict.fromkeys(re.findall(r"(\d)/8", seen.written))) == ["0", "3", "6", "8"]


def test_refresh_rate_zero_shows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as seen:
        trainer_with_bar(tmp_path, TQDMProgressBar(refresh_rate=0)).fit(Shown(), batches(), batches(4))
    assert seen.written == ""


# --- piped -----------------------------------------------------------------------------------------------------------


def test_piped_output_has_a_line_an_epoch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer_with_bar(tmp_path, max_epochs=3, num_sanity_val_steps=1).fit(Shown(), batches(), batches(4))
    output = capfd.readouterr()
    lines = bars_in(output.out.splitlines())
    assert epochs_of(lines) == ["0/2", "1/2", "2/2"]
    assert all(re.match(r"Epoch ./2: 4/4 \[00:\d\d, [\d.]+it/s, shown=[\d.e-]+\]$", line) for line in lines)
    assert "\r" not in output.out
    assert output.err == ""


def test_piped_output_of_many_short_epochs_is_bounded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    trainer_with_bar(tmp_path, max_epochs=100).fit(Shown(), batches(2))
    allowed = 10 + (time.monotonic() - began) + 1
    lines = bars_in(capfd.readouterr().out.splitlines())
    assert 10 <= len(lines) <= allowed
    assert lines[-1].startswith("Epoch 99/99: 1/1")


def test_a_long_epoch_has_a_line_now_and_then(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bar = TQDMProgressBar(seconds_between_lines=0.0)
    trainer_with_bar(tmp_path, bar, max_epochs=1).fit(Shown(), batches())
    lines = bars_in(capfd.readouterr().out.splitlines())
    assert [line.split(" ")[2] for line in lines] == ["1/4", "2/4", "3/4", "4/4"]


def test_a_negative_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="refresh_rate must be 0 or more, got -1"):
        TQDMProgressBar(refresh_rate=-1)


# --- in a notebook ---------------------------------------------------------------------------------------------------


def pretend_kernel(monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]) -> None:
    """Install the one IPython function by which a kernel is recognized."""
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(config=config)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)


def test_a_kernel_is_a_notebook_and_a_terminals_ipython_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_kernel(monkeypatch, {"IPKernelApp": {}})
    assert current_console() in ("notebook", "plain_notebook")
    pretend_kernel(monkeypatch, {"TerminalIPythonApp": {}})
    assert current_console() in ("terminal", "file")


def test_widgets_are_used_only_where_they_are_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_kernel(monkeypatch, {"IPKernelApp": {}})
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert current_console() == "plain_notebook"
    (tmp_path / "ipywidgets.py").touch()
    assert current_console() == "notebook"


def test_below_the_first_bar_there_is_a_second_only_where_the_cursor_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[tuple[str, str]] = []

    class Noted(Callback):
        def on_validation_start(self, trainer: Any, module: Any) -> None:
            bar = trainer.progress_bar_callback
            kinds.append((type(bar._training).__name__, type(bar._evaluation).__name__))

    for run in range(3):
        with terminal(monkeypatch) if run else nullcontext(), monkeypatch.context() as patch:
            if run == 2:
                pretend_kernel(patch, {"IPKernelApp": {}})
            trainer_with_bar(tmp_path, Noted(), max_epochs=1).fit(Shown(), batches(), batches(4))
    assert kinds == [("LineBar", "NoneType"), ("TqdmBar", "TqdmBar"), ("TqdmBar", "NoneType")]
