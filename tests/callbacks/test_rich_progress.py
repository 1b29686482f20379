"""RichProgressBar on real pseudo-terminals, wide and narrow, and without one: what it shows."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted, batches, trainer_in
from terminal import terminal
from test_progress import Endless, Validated, pretend_kernel

from echelon import Callback, ConfigError, MissingDependencyError, RichProgressBar, TQDMProgressBar
from echelon.callbacks import RichProgressBarTheme

_STYLE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def rows(written: str) -> list[str]:
    """The lines that were drawn, each time, without their colours."""
    return [row.strip() for row in re.split(r"[\r\n]+", _STYLE.sub("", written)) if row.strip()]


def wide(columns: int = 140, **options: Any) -> RichProgressBar:
    """A bar of this width: rich asks the terminal of the standard streams for it, which in a test is another one."""
    return RichProgressBar(console_kwargs={"width": columns}, **options)


def fit(folder: Path, bar: RichProgressBar, *callbacks: Callback, data: Any = None, **settings: Any) -> Any:
    options = {"enable_progress_bar": True, "max_epochs": 2, **settings}
    trainer = trainer_in(folder, bar, *callbacks, **options)
    trainer.fit(Validated(), batches() if data is None else data, [batches(4), batches(4)])
    return trainer


def test_a_terminal_shows_epochs_validations_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Prints(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            module.print("epoch [0] is over")

    with terminal(monkeypatch) as seen:
        trainer = fit(tmp_path, wide(), Prints(), num_sanity_val_steps=1)
        trainer.validate(Validated(), [batches(4), batches(4)], verbose=False)
    drawn = rows(seen.written)
    assert any(re.match(r"Sanity checking ━+ \d+/2 ", row) for row in drawn)
    assert any(re.match(r"Validating ━+╸? +━* *\d+/\d+ ", row) or row.startswith("Validating ") for row in drawn)
    last = [row for row in drawn if row.startswith("Epoch 1/1 ") and row.endswith("val_acc/1: 0.001")][-1]
    pattern = r"Epoch 1/1 ━+ 4/4 \d:\d\d:\d\d • 0:00:00 [\d.]+it/s shown: [\d.]+ val_acc/0: 0.250 val_acc/1: 0.001"
    assert re.fullmatch(pattern, last)
    assert drawn.count("epoch [0] is over") == 2
    assert drawn[-1].startswith("Validating") and "4/4" in drawn[-1]  # of validate(), left at the end


def test_the_columns_may_be_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(RichProgressBar):
        def configure_columns(self, trainer: Any) -> list[Any]:
            from rich.progress import TextColumn

            assert trainer.max_epochs == 1
            return [*super().configure_columns(trainer)[:3], TextColumn("of my own")]

    with terminal(monkeypatch) as seen:
        fit(tmp_path, Own(console_kwargs={"width": 140}), max_epochs=1)
    assert any(re.fullmatch(r"Epoch 0/0 ━+ 4/4 of my own", row) for row in rows(seen.written))


def test_narrow_terminals_keep_the_epoch_and_the_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as seen:
        fit(tmp_path, wide(40), max_epochs=1)
    drawn = rows(seen.written)
    last = [row for row in drawn if re.match(r"Epoch 0/0 ━+ 4/4 shown: ", row)][-1]
    assert len(last) <= 40 and "it/s" not in last and all(len(row) <= 40 for row in drawn)


def test_data_without_a_length_and_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.data import DataLoader

    bar = wide(leave=True, theme=RichProgressBarTheme(metrics_text_delimiter=" | ", metrics_format=".1e"))
    with terminal(monkeypatch) as seen:
        fit(tmp_path, bar, data=DataLoader(Endless(), batch_size=None))
    drawn = rows(seen.written)
    for epoch in (0, 1):
        assert any(re.match(rf"Epoch {epoch}/1 ━* *7/-- .*it/s shown: [-+\d.e]+ \| ", row) for row in drawn), drawn[-5:]


def test_piped_output_and_a_notebook_without_widgets_get_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, RichProgressBar())
    assert len(re.findall(r"^Epoch [01]/1: 4/4 \[.*shown: .*\]$", capsys.readouterr().out, re.MULTILINE)) == 2
    with terminal(monkeypatch) as seen, monkeypatch.context() as patch:
        pretend_kernel(patch, {"IPKernelApp": {}})
        fit(tmp_path, RichProgressBar(), max_epochs=1)
    assert "Epoch 0/0: 4/4 [" in seen.written and "━" not in seen.written


def test_an_error_leaves_the_terminal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Scripted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise ArithmeticError("in a step")

    bar = RichProgressBar()
    with terminal(monkeypatch) as seen:
        stream = sys.stdout
        with pytest.raises(ArithmeticError):
            trainer_in(tmp_path, bar, enable_progress_bar=True, max_epochs=1).fit(Fails([1.0]), batches())
        assert sys.stdout is stream
        again = pickle.loads(pickle.dumps(bar))
        fit(tmp_path, again, max_epochs=1)
    assert seen.written.count("\x1b[?25l") == seen.written.count("\x1b[?25h")  # the cursor, hidden and shown


def test_mistakes_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="RichProgressBar: refresh_rate must be 0 or more, got -1"):
        RichProgressBar(-1)
    with pytest.raises(ConfigError, match="at most 1 progress bar, got 2"):
        trainer_in(tmp_path, RichProgressBar(), TQDMProgressBar(), enable_progress_bar=True)
    with pytest.raises(ConfigError, match="`enable_progress_bar=False` but found `RichProgressBar`"):
        trainer_in(tmp_path, RichProgressBar(), enable_progress_bar=False)
    assert trainer_in(tmp_path, RichProgressBar(0), enable_progress_bar=True).progress_bar_callback.is_disabled
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delitem(sys.modules, "rich")
    with pytest.raises(MissingDependencyError, match="pip install rich"):
        RichProgressBar()
