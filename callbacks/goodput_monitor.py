"""GoodputMonitor: records where a run's time goes, across all restarts, in the run's folder."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Final, cast

from torch import nn

from ..common.errors import ConfigError
from ..strategies.resilience.rounds import RoundEnd
from .callback import Callback
from .goodput.ledger import (
    FILE_NAME,
    PARTS,
    AdviceRecord,
    Category,
    EndRecord,
    LedgerFile,
    LedgerRecord,
    LeftUpload,
    PeriodRecord,
    StartRecord,
    Status,
    read_ledger,
    take_over,
    to_microseconds,
)
from .goodput.spans import account_for_time, divide_duration, format_clock, goodput_of
from .helpers.loggers import tell_loggers
from .run import Recoverable, Run

RoundOf = Callable[[], tuple[int, Sequence[RoundEnd]]]

_ENDS: Final = 8
"""Number of ends of earlier rounds that a start repeats: several rounds may have ended before they wrote a line."""
_FITS: Final = itertools.count()
"""Counts the monitored fits of this process: only the first one starts with the process."""


class GoodputMonitor(Callback):
    """Writes ``goodput.jsonl`` into the run's folder: how much time goes into steps that count.

    ``echelon goodput RUN`` shows it. Rank 0 writes a line every `every_seconds`, and at checkpoints, in long
    validations and at the end; a run that is resumed in the same folder continues the file. Every `every_seconds` the
    loggers get ``goodput/goodput`` and the fractions of all time so far (``goodput/productive``, ``goodput/redone``,
    ...), and at the end a table. Time is measured on the host: work queued on an accelerator counts where it is
    awaited. If the disk is full, the ledger ends with a warning and the run continues. The hooks run on every rank, and
    communicate only in `on_fit_start`; a step costs 0.5 us.

    Args:
        every_seconds: seconds of records that a kill may lose; 0 writes a line after every step.
        round_of: returns the number of this round of an elastic run, and the ends of earlier rounds.

    Raises:
        ConfigError: if `every_seconds` is negative; and on every rank, when `fit` starts, if rank 0 cannot write the
            file.

    Example::

        Trainer(max_epochs=1, callbacks=GoodputMonitor()).fit(module, train_loader)
        # then, in a shell: echelon goodput echelon_logs
    """

    def __init__(self, every_seconds: float = 5.0, *, round_of: RoundOf | None = None) -> None:
        if not every_seconds >= 0:
            raise ConfigError(f"GoodputMonitor: every_seconds must be >= 0, got {every_seconds}.")
        self._every_seconds = every_seconds
        self._round_of = round_of
        self._file: LedgerFile | None = None
        self._path = Path()
        self._totals: dict[Category, int] = {}
        """Time of each category in the whole ledger; empty until the first log, as reading takes a while."""
        self._process_start = 0.0
        self._offset = 0.0
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._activity: Category = "productive"
        self._since = self._saved = 0.0
        self._written_at = 0
        self._due_at = math.inf
        self._is_resumed = self._is_starting = False
        self._first = self._last = 0
        self._status: Status = "success"
        self._cause = self._advice = ""
        self._upload: LeftUpload | None = None

    # --- begin -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Note the time at which the run starts."""
        if stage == "fit":
            # in a notebook, or from the second fit on, the time before fit() is not start-up
            is_first = next(_FITS) == 0 and not hasattr(sys, "ps1")
            self._offset = time.time() - monotonic()
            self._process_start = _process_start() if is_first else time.time()
            self._is_resumed = False

    def on_load_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, object]) -> None:
        """Note that this round resumes from a checkpoint."""
        self._is_resumed = True

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Open the ledger and begin a round. Collective: all ranks learn whether rank 0 can write."""
        self._first = self._last = trainer.global_step
        self._is_starting = True
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._activity, self._since, self._saved = (
            "productive",
            monotonic(),
            cast(Recoverable, trainer).checkpoint_seconds,
        )
        self._status, self._cause, self._advice = "success", "", ""
        trainer.strategy.ranks.all.on_first_rank(partial(self._open, trainer))
        self._due_at = math.inf if self._file is None else 0.0

    def _open(self, trainer: Run) -> None:
        """Open the ledger and write the start of a round."""
        number, ends = (0, ()) if self._round_of is None else self._round_of()
        self._path, self._totals = Path(trainer.log_dir) / FILE_NAME, {}
        self._written_at = to_microseconds(self._since + self._offset)
        start = StartRecord(
            time=self._written_at,
            process_start=to_microseconds(self._process_start),
            round=number,
            world_size=trainer.strategy.world_size,
            step=trainer.global_step,
            is_resumed=self._is_resumed,
            ends=tuple(ends[-_ENDS:]),
        )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._round_of is not None:  # workers of the last round may still be alive, cut off or stopped
                take_over(self._path)
            self._file = LedgerFile(self._path)
            self._file.append(start)
        except OSError as error:
            self._close()
            raise ConfigError(
                f"GoodputMonitor cannot write {str(self._path)!r} ({error.strerror}); give the trainer a logger or "
                "default_root_dir in a folder that can be written."
            ) from error

    # --- steps -------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: object, batch_idx: int) -> None:
        """End the wait for data since the last step."""
        if self._activity == "data_wait":
            if trainer.global_step < self._last:
                self._roll_back(trainer)
            self._begin("productive", trainer)

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Begin to wait for data, and write a line if it is due."""
        step = trainer.global_step
        self._last = step if step >= self._last else self._last + 1  # a callback before this one has rolled back
        has_saved = cast(Recoverable, trainer).checkpoint_seconds != self._saved  # a callback before this one has saved
        self._begin("data_wait", trainer)
        now = self._since
        if now >= self._due_at:
            is_start = self._is_starting
            self._due_at = now + self._every_seconds
            self._flush(now)
            if not is_start:  # the first log opens files and imports modules
                self._log(trainer)
            self._since = monotonic()
        elif has_saved and self._is_long_enough():
            self._flush(now)

    def _roll_back(self, trainer: Run) -> None:
        """Write the steps before a rollback, which happened since the last step; that wait was for a checkpoint."""
        self._flush(self._since)
        self._activity = "checkpoint"
        self._first = self._last = trainer.global_step
        self._totals = {}  # steps that were productive are lost

    # --- checkpoints and validations ---------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, object]) -> None:
        """Write the steps that the checkpoint will contain, before it exists."""
        if self._activity == "data_wait" and self._is_long_enough():
            self._flush(self._since)

    def _is_long_enough(self) -> bool:
        """Return whether the time up to the last step is worth a line: snapshots in memory may be more frequent."""
        is_open = self._file is not None
        return is_open and to_microseconds(self._since + self._offset) - self._written_at > to_microseconds(
            self._every_seconds / 10
        )

    def on_validation_start(self, trainer: Run, module: nn.Module) -> None:
        """Begin a validation; the sanity check counts as start-up."""
        if not trainer.sanity_checking:
            self._begin("validation", trainer)

    def on_validation_batch_end(
        self, trainer: Run, module: nn.Module, outputs: object, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Write a line if it is due."""
        if self._activity == "validation" and monotonic() >= self._due_at:
            self._begin("validation", trainer)
            self._last = trainer.global_step
            self._due_at = self._since + self._every_seconds
            self._flush(self._since)

    def on_validation_end(self, trainer: Run, module: nn.Module) -> None:
        """End a validation, which is part of the step before it."""
        if self._activity == "validation":
            self._begin("productive", trainer)

    # --- end ---------------------------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Write the last steps; what follows is the wait for the last checkpoint."""
        if trainer.global_step < self._last:
            self._roll_back(trainer)
        self._begin("checkpoint", trainer)
        self._last = trainer.global_step
        self._flush(self._since)

    def on_fit_end(self, trainer: Run, module: nn.Module) -> None:
        """Write how long the last checkpoint took, and log the account of the whole time."""
        self._begin("checkpoint", trainer)
        self._flush(self._since)
        self._status = "interrupted" if trainer.is_interrupted else "success"
        self._log(trainer)
        if self._file is not None:
            tell_loggers(trainer.loggers, "log_text", "goodput", _format_totals(self._totals, self._advice))

    def on_exception(self, trainer: Run, module: nn.Module, exception: BaseException) -> None:
        """Write the steps so far; the time of an incomplete step is lost."""
        self._status = "interrupted" if isinstance(exception, KeyboardInterrupt) else "failed"
        self._cause = f"{type(exception).__name__}: {exception}"
        if self._file is None:
            return
        if self._activity == "productive" and not self._is_starting:
            self._activity = "redone"
        self._begin("productive", trainer)
        self._last = max(self._last, trainer.global_step)
        self._flush(self._since)

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Write how the round ended, and close the ledger."""
        if self._file is not None:
            self._write(EndRecord(to_microseconds(monotonic() + self._offset), self._status, self._cause))
        self._close()

    def __getstate__(self) -> dict[str, object]:
        """Return the state without the open file."""
        return {**self.__dict__, "_file": None}

    def note_advice(self, text: str) -> None:
        """Write what would shorten the steps of this round most; the table at the end shows it, too."""
        self._advice = text
        if self._file is not None:
            self._write(AdviceRecord(to_microseconds(monotonic() + self._offset), text))

    # --- parts -------------------------------------------------------------------------------------------------------

    def _begin(self, activity: Category, trainer: Run) -> None:
        """Add the time since the last call, minus the time spent on checkpoints, to the activity that ends now."""
        now, saved = monotonic(), cast(Recoverable, trainer).checkpoint_seconds
        if self._activity != "productive":  # the rest of each period
            self._parts[self._activity] += now - self._since - (saved - self._saved)
        self._parts["checkpoint"] += saved - self._saved
        self._activity, self._since, self._saved = activity, now, saved
        pending = cast(Recoverable, trainer).pending_upload
        self._upload = None if pending is None else LeftUpload(pending.step, pending.left, pending.size)

    def _flush(self, now: float) -> None:
        """Write the time since the last line, and the steps completed in it."""
        end = max(self._written_at, to_microseconds(now + self._offset))
        duration, self._written_at = end - self._written_at, end
        parts: dict[str, int] = {name: max(0, to_microseconds(seconds)) for name, seconds in self._parts.items()}
        self._parts = dict.fromkeys(PARTS, 0.0)
        if self._is_starting:  # the first step counts, too: it compiles and warms up
            parts["start_up"] = max(0, duration - sum(parts.values()))
            self._is_starting = self._last == self._first
        period = PeriodRecord(end, duration, self._first, self._last, parts, self._upload)
        self._first = self._last
        self._write(period)
        if self._totals:
            for category, part in divide_duration(duration, parts).items():
                self._totals[category] += part

    def _write(self, record: LedgerRecord) -> None:
        if self._file is None:
            return
        try:
            self._file.append(record)
        except OSError as error:
            self._close()
            warnings.warn(
                f"The goodput ledger ends here, because it can no longer be written ({error.strerror}); free some disk "
                "space.",
                stacklevel=2,
            )

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._due_at = math.inf

    def _log(self, trainer: Run) -> None:
        """Log the fractions of all time up to the line that was just written."""
        if self._file is None:
            return
        try:
            self._totals = self._totals or account_for_time(read_ledger(self._path)).micros
        except OSError as error:  # the ledger cannot be read: the run is over, and the file stays
            warnings.warn(f"GoodputMonitor cannot read its ledger ({error}); its figures are not logged.", stacklevel=2)
            return
        total = max(1, sum(self._totals.values()))
        shares = {f"goodput/{category}": part / total for category, part in self._totals.items()}
        trainer.log_metrics({"goodput/goodput": goodput_of(self._totals), **shares})


def _format_totals(totals: Mapping[Category, int], advice: str) -> str:
    total = max(1, sum(totals.values()))
    rows = [
        f"| {category} | {format_clock(part, tenths=True)} | {part / total:.1%} |" for category, part in totals.items()
    ]
    return "\n".join(
        [
            f"Goodput {goodput_of(totals):.1%}",
            "",
            "| time | h:mm:ss | share |",
            "|---|---|---|",
            *rows,
            *(["", advice] if advice else []),
        ]
    )


def _process_start() -> float:
    """Return when this process was started, as a ``time.time`` to within 10 ms; now, if the system does not say."""
    try:
        stat = Path("/proc/self/stat").read_text(encoding="utf-8")
        ticks = int(stat.rpartition(")")[2].split()[19])  # field 22; the second is a name in parentheses
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        age = 0.0
    return time.time() - max(0.0, age)
