"""Scenarios around a fit: notebooks and their event loops, and other surroundings of a program."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import types
from typing import Any

import torch
from scenario import Fit, loader, scenario


@scenario
def a_fit_inside_an_event_loop(fit: Fit) -> None:
    """As in a cell of a notebook, whose kernel runs one."""

    async def cell() -> Any:
        return fit()

    assert asyncio.run(cell()).global_step == fit.steps


@scenario
def a_fit_in_a_thread_of_an_event_loop(fit: Fit) -> None:
    async def cell() -> Any:
        return await asyncio.to_thread(fit)

    assert asyncio.run(cell()).global_step == fit.steps


@scenario
def an_interrupt_inside_an_event_loop(fit: Fit) -> None:
    async def cell(act: Any) -> None:
        fit(act)

    with fit.signalled(signal.SIGINT, KeyboardInterrupt) as act:
        asyncio.run(cell(act))


@scenario
def a_cell_that_is_interrupted_and_run_again(fit: Fit) -> None:
    with fit.signalled(signal.SIGINT, KeyboardInterrupt) as act:
        fit(act)
    fit()


_CELL = """
from scenario import Tower

class Cell(Tower):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * FACTOR

FACTOR = 2
"""


@scenario
def a_class_of_a_cell(fit: Fit) -> None:
    """Its module is a `__main__` that no file holds."""
    main = sys.modules["__main__"]
    cell = types.ModuleType("__main__")
    sys.modules["__main__"] = cell
    try:
        exec(_CELL, vars(cell))  # noqa: S102 - as a notebook does
        fit.trainer().fit(vars(cell)["Cell"](), loader())
        assert sys.modules["__main__"] is cell
    finally:
        sys.modules["__main__"] = main


class Stream(io.TextIOBase):
    """A stream without a descriptor, like a notebook kernel's."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


@scenario
def streams_without_a_descriptor(fit: Fit) -> None:
    with contextlib.redirect_stdout(Stream()), contextlib.redirect_stderr(Stream()):
        fit(enable_progress_bar=True, enable_model_summary=True)


@scenario
def no_streams(fit: Fit) -> None:
    """As in a program without a console."""
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        fit(enable_progress_bar=True, enable_model_summary=True)


_CLOSED = """
import sys
from pathlib import Path

sys.path += {path!r}
from scenario import Fit

try:
    Fit({strategy!r}, Path({folder!r}))(lambda _: 1 // 0, enable_progress_bar=True, enable_model_summary=True)
except ZeroDivisionError:
    Path({folder!r}, "told").write_text("mine")
"""


@scenario
def a_program_that_was_started_without_streams(fit: Fit) -> None:
    code = _CLOSED.format(path=sys.path, strategy=fit.strategy, folder=str(fit.folder))
    subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code], check=True, timeout=120)
    assert (fit.folder / "told").read_text() == "mine"


@scenario
def a_program_that_changes_its_folder(fit: Fit) -> None:
    before = os.getcwd()
    try:
        fit(lambda _: os.chdir(fit.folder))
    finally:
        os.chdir(before)


@scenario
def variables_that_a_hook_sets(fit: Fit) -> None:
    """In this process they stay, as a hook's actions are the user's; the trainer's own do not."""
    try:
        fit(lambda _: os.environ.__setitem__("SET_BY_A_HOOK", "1"))
    finally:
        os.environ.pop("SET_BY_A_HOOK", None)


@scenario
def settings_of_torch(fit: Fit) -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("high")
    try:
        fit(benchmark=True, deterministic=False)
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
