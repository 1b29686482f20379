"""GoodputMonitor: keeps the ledger of where a run's time goes, over all restarts, in the run's folder."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, Final, cast

from torch import nn

from ..strategies.errors import ConfigError
from .callback import Callback
from .goodput.ledger import FILE_NAME, End, Ended, LedgerFile, Period, Record, SeenEnd, Start, micros, read_ledger
from .goodput.spans import Category, account, clock, goodput_of, made_of
from .run import Recoverable, Run

RoundOf = Callable[[], tuple[int, Sequence[SeenEnd]]]

_ENDS: Final = 8
"""How many ends of earlier rounds a start tells: several may have ended before they had a line of their own."""
_FITS: Final = itertools.count()
"""Counts the fits of this process that were monitored: the first one alone has the process's start for its own."""


class GoodputMonitor(Callback):
    """Writes ``goodput.jsonl`` into the run's folder: what time went into steps that count, and where the rest went.

    ``echelon goodput RUN`` shows it. Rank 0 writes a line every `every_seconds`, and at checkpoints, long validations
    and ends; a run that is resumed in the same folder goes on in the same file. The loggers get ``goodput/goodput`` and
    the shares of all time so far (``goodput/productive``, ``goodput/redone``, ...) every `every_seconds`, and a table
    at the end. Time is that of the host: work queued on an accelerator counts where it is awaited. A disk that is full
    ends the ledger, with a warning, and not the run. The hooks run on every rank, and communicate in `on_fit_start`
    only; a step costs 0.5 us.

    Args:
        every_seconds: how much of the account a kill may lose; 0 writes a line after every step.
        round_of: returns the number of this round of an elastic run, and how the rounds before it ended.

    Raises:
        ConfigError: for a negative time; and when `fit` starts, on every rank, if rank 0 cannot write the file.
    """

    def __init__(self, every_seconds: float = 5.0, *, round_of: RoundOf | None = None) -> None:
        if not every_seconds >= 0:
            raise ConfigError(f"GoodputMonitor: every_seconds={every_seconds} is not possible; give 0 or more.")
        self._every_seconds = every_seconds
        self._round_of = round_of
        self._file: LedgerFile | None = None
        self._path = Path()
        self._totals: dict[Category, int] = {}
        """Of the whole ledger; empty until somebody asks, since reading a long one takes a while."""
        self._process_start = 0.0
        self._offset = 0.0
        self._parts = dict.fromkeys(("data_wait", "validation", "checkpoint", "redone"), 0.0)
        self._written_at = 0
        self._due_at = math.inf
        self._is_resumed = self._is_starting = False
        self._first = self._last = 0
        self._idle_since = self._step_ended_at = self._validating_since = self._waited = 0.0
        self._has_saved = False
        self._checkpoint_seconds = 0.0
        self._status, self._cause = "success", ""

    # --- begin -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Note when this began, if training will follow."""
        if stage == "fit":
            # what an interpreter or a process did before is no start of this run
            is_first = next(_FITS) == 0 and not hasattr(sys, "ps1")
            self._offset = time.time() - monotonic()
            self._process_start = _process_start() if is_first else time.time()
            self._is_resumed = False

    def on_load_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Note that this round goes on from somewhere."""
        self._is_resumed = True

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Open the ledger and begin a round. Collective: all ranks learn whether rank 0 can."""
        now = monotonic()
        self._first = self._last = trainer.global_step
        self._is_starting = True
        self._step_ended_at, self._idle_since, self._validating_since = now, 0.0, 0.0
        self._parts = dict.fromkeys(self._parts, 0.0)
        self._has_saved, self._checkpoint_seconds = False, cast(Recoverable, trainer).checkpoint_seconds
        self._status, self._cause = "success", ""
        path = Path(trainer.log_dir) / FILE_NAME
        fault = trainer.strategy.broadcast(self._open(trainer, path, now) if trainer.is_global_zero else "")
        self._due_at = math.inf if self._file is None else 0.0
        if fault:
            raise ConfigError(
                f"GoodputMonitor cannot write {str(path)!r} ({fault}); give the trainer a logger or default_root_dir "
                "with a folder that can be written to."
            )

    def _open(self, trainer: Run, path: Path, now: float) -> str:
        """Write that a round begins; return what went wrong."""
        number, ends = (0, ()) if self._round_of is None else self._round_of()
        self._written_at = micros(now + self._offset)
        file: LedgerFile | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = LedgerFile(path)
            start = Start(
                time=self._written_at,
                process_start=micros(self._process_start),
                round=number,
                world_size=trainer.strategy.world_size,
                step=trainer.global_step,
                is_resumed=self._is_resumed,
                ends=tuple(Ended.of(end) for end in ends[-_ENDS:]),
            )
            file.append(start)
        except OSError as error:
            if file is not None:
                file.close()
            return str(error.strerror)
        self._file, self._path, self._totals = file, path, {}
        return ""

    # --- steps -------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: Any, batch_idx: int) -> None:
        """End the wait for data that began with the end of a step."""
        if self._idle_since:
            waited = monotonic() - self._idle_since
            self._idle_since = 0.0
            if self._has_saved:
                waited -= self._note_saves(trainer)
            self._waited = waited
            self._parts["data_wait"] += waited

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Begin to wait, and write a line where one is due."""
        now = monotonic()
        step = trainer.global_step
        if step < self._last:
            self._roll_back(trainer, step - 1)
        self._last = step
        self._idle_since = self._step_ended_at = now
        if self._has_saved:  # by a callback that comes before this one
            self._note_saves(trainer)
            if self._is_long_enough(now):
                self._flush(now)
        if now >= self._due_at:
            is_start = self._is_starting
            self._due_at = now + self._every_seconds
            self._flush(now)
            if not is_start:  # the first thing that is logged opens files, and imports what does that
                self._log(trainer)
            self._idle_since = monotonic()

    def _roll_back(self, trainer: Run, step: int) -> None:
        """Close what was done before the run went back to `step`; what it waited for then was the checkpoint."""
        self._parts["data_wait"] -= self._waited
        waited_since, self._waited = self._waited, 0.0
        self._flush(self._step_ended_at)
        self._parts["checkpoint"] += waited_since
        self._first = step
        self._totals = {}  # what was productive is not any more

    # --- checkpoints and validations ---------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Write down the steps that the checkpoint holds, before there is one."""
        self._has_saved = True
        if self._idle_since and self._is_long_enough(self._idle_since):
            self._flush(self._idle_since)

    def _is_long_enough(self, now: float) -> bool:
        """Whether there is a period to write: snapshots in memory may come more often than is worth a line."""
        is_open = self._file is not None
        return is_open and micros(now + self._offset) - self._written_at > micros(self._every_seconds / 10)

    def on_validation_start(self, trainer: Run, module: nn.Module) -> None:
        """Begin a validation; the sanity check is part of the start-up."""
        if not trainer.sanity_checking:
            self._validating_since = monotonic()

    def on_validation_batch_end(
        self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Write a line where one is due."""
        now = monotonic()
        if now >= self._due_at and self._validating_since:
            self._note_validation(now)
            self._last = trainer.global_step
            self._due_at = now + self._every_seconds
            self._flush(now)

    def on_validation_end(self, trainer: Run, module: nn.Module) -> None:
        """End a validation."""
        if self._validating_since:
            self._note_validation(monotonic())
            self._validating_since = 0.0

    def _note_validation(self, now: float) -> None:
        self._parts["validation"] += now - self._validating_since
        self._validating_since = now

    def _note_saves(self, trainer: Run) -> float:
        """Add and return for how long training has waited for checkpoints since the last time."""
        self._has_saved = False
        waited = cast(Recoverable, trainer).checkpoint_seconds - self._checkpoint_seconds
        self._checkpoint_seconds += waited
        self._parts["checkpoint"] += waited
        return waited

    # --- end ---------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Write the last steps."""
        self._note_saves(trainer)
        self._idle_since = 0.0
        self._last = trainer.global_step
        self._flush(monotonic())

    def on_fit_end(self, trainer: Run, module: nn.Module) -> None:
        """Write for how long the last checkpoint was awaited, and tell the loggers where all time went."""
        now = monotonic()
        self._parts["checkpoint"] = now + self._offset - self._written_at / 1e6
        self._flush(now)
        self._status = "interrupted" if trainer.is_interrupted else "success"
        self._log(trainer)
        if self._file is not None:
            for logger in trainer.loggers:
                logger.log_text("goodput", _markdown(self._totals))

    def on_exception(self, trainer: Run, module: nn.Module, exception: BaseException) -> None:
        """Write down what was done until then; a step that was not completed was done in vain."""
        now = monotonic()
        self._status = "interrupted" if isinstance(exception, KeyboardInterrupt) else "failed"
        self._cause = f"{type(exception).__name__}: {exception}"
        if self._file is None:
            return
        if self._validating_since:
            self._note_validation(now)
            self._validating_since = 0.0
        elif not self._idle_since and not self._is_starting:
            self._parts["redone"] += max(0.0, now - self._step_ended_at - self._waited)
        self._note_saves(trainer)
        self._last = max(self._last, trainer.global_step)
        self._flush(now)

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Write how the round ended, and close the ledger."""
        if self._file is not None:
            self._write(End(micros(monotonic() + self._offset), self._status, self._cause))
        self._close()

    def __getstate__(self) -> dict[str, Any]:
        """Leave an open file behind."""
        return {**self.__dict__, "_file": None}

    # --- parts -------------------------------------------------------------------------------------------------------

    def _flush(self, now: float) -> None:
        """Write the time since the last line, and the steps completed in it."""
        end = max(self._written_at, micros(now + self._offset))
        duration, self._written_at = end - self._written_at, end
        parts = {name: max(0, micros(seconds)) for name, seconds in self._parts.items()}
        self._parts = dict.fromkeys(self._parts, 0.0)
        if self._is_starting:  # the first step, too: it compiles, and warms up what the others use
            parts["data_wait"] = 0
            parts["start_up"] = max(0, duration - sum(parts.values()))
            self._is_starting = self._last == self._first
        period = Period(end, duration, self._first, self._last, parts)
        self._first = self._last
        self._write(period)
        if self._totals:
            for category, part in made_of(period).items():
                self._totals[category] += part

    def _write(self, record: Record) -> None:
        if self._file is None:
            return
        try:
            self._file.append(record)
        except OSError as error:
            self._close()
            warnings.warn(
                f"The goodput ledger ends here, it cannot be written any more ({error.strerror}); make room for it.",
                stacklevel=2,
            )

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._due_at = math.inf

    def _log(self, trainer: Run) -> None:
        """Tell the loggers the shares of all time so far, up to the line that was just written."""
        if self._file is None:
            return
        if not self._totals:
            self._totals = account(read_ledger(self._path)).micros
        total = max(1, sum(self._totals.values()))
        shares = {f"goodput/{category}": part / total for category, part in self._totals.items()}
        trainer.log_metrics({"goodput/goodput": goodput_of(self._totals), **shares})


def _markdown(totals: Mapping[Category, int]) -> str:
    total = max(1, sum(totals.values()))
    rows = [f"| {category} | {clock(part, tenths=True)} | {part / total:.1%} |" for category, part in totals.items()]
    return "\n".join([f"Goodput {goodput_of(totals):.1%}", "", "| time | h:mm:ss | share |", "|---|---|---|", *rows])


def _process_start() -> float:
    """Return when this process was started, as of ``time.time``, to 10 ms; where nobody tells, now."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8")
        ticks = int(stat.rpartition(")")[2].split()[19])  # field 22; the second is a name in parentheses
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        age = 0.0
    return time.time() - max(0.0, age)
