"""CSVLogger: metrics as a table in a text file, for spreadsheets, pandas and machines without TensorBoard."""

from __future__ import annotations

import csv
import os
import re
import warnings
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Final, Self, TextIO

from torch import nn

from ...common.errors import ConfigError
from ...strategies.cluster.environment import node_folder
from ...strategies.state.regular_file import open_regular
from ...strategies.state.schema import format_as_line
from .base import FolderLogger, VersionFolder, open_replacement

_LONGEST_LINE: Final = 1 << 20
"""Bytes of a line of ``metrics.csv``."""


class CSVLogger(FolderLogger):
    """Write ``metrics.csv`` and ``hparams.yaml`` into ``<save_dir>/<name>/version_<N>``.

    A row is one call of `log_metrics`: its step and its values, with the other columns empty. A metric that is first
    logged later adds a column. An existing version is continued.

    Args:
        save_dir: the folder that holds the runs of all names.
        name: the folder of these runs in it; empty or None for none.
        version: the number or the name of this run; by default the number after the last.
        prefix: stands before the names of all metrics.
        flush_logs_every_n_steps: optimizer steps between two writes to the disk.

    Raises:
        ConfigError: for a `flush_logs_every_n_steps` below 1.

    Example::

        logger = CSVLogger("runs", name="csv")
        Trainer(max_epochs=1, logger=logger, log_every_n_steps=1).fit(module, train_loader)
        print(Path(logger.log_dir, "metrics.csv").read_text())
    """

    NAME_METRICS_FILE: ClassVar[str] = "metrics.csv"
    NAME_HPARAMS_FILE: ClassVar[str] = "hparams.yaml"

    def __init__(
        self,
        save_dir: str | Path,
        name: str | None = "echelon_logs",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        if flush_logs_every_n_steps < 1:
            raise ConfigError(f"flush_logs_every_n_steps must be at least 1, got {flush_logs_every_n_steps}; give 1.")
        super().__init__(VersionFolder(save_dir, name, version), prefix)
        self._flush_every = flush_logs_every_n_steps
        self._flushed_step = 0
        self._last_step = -1
        self._rows: list[dict[str, Any]] = []
        self._kept: list[dict[str, str]] = []  # the rows of the step that the run resumes from
        self._columns: list[str] | None = None  # None: the file, if it exists, has yet to be read
        self._is_supervised = False
        self._left_as: tuple[int, int] | None = None

    def open(self) -> None:
        """Create the folder of the run, and note the table in it."""
        super().open()
        self._is_supervised = node_folder() is not None
        self._left_as = _identify_file(self._path)

    @property
    def _path(self) -> Path:
        return self._folder.path / self.NAME_METRICS_FILE

    @property
    def metrics_file_path(self) -> str:
        """The path of the table."""
        return str(self._path)

    @property
    def experiment(self) -> Self:
        """This logger: there is no other object behind it."""
        return self

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add a row; it reaches the file every `flush_logs_every_n_steps` steps and at `save`.

        Without a step, it is the step after the last row's.
        """
        if self._is_silent:
            return
        if step is None:
            step = self._last_step + 1
        self._last_step = step
        row = {**self.named(metrics), "step": step}
        if self._kept and _as_text(row) in self._kept:  # the end of an epoch that was already logged before a kill
            return
        self._rows.append(row)
        if step - self._flushed_step >= self._flush_every:
            self.save()

    def log_hyperparams(
        self, params: Mapping[str, Any] | Namespace | None = None, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Write the hyper-parameters, including those of earlier calls; `metrics` become a row at step 0."""
        if self._is_silent:
            return
        self.keep_hyperparams({} if params is None else params)
        self.write_texts()
        if metrics:
            self.log_metrics(metrics, 0)

    def log_text(self, tag: str, text: str) -> None:
        """Write the text to its own file, ``<tag>.txt``."""
        if not self._is_silent:
            self._texts[f"{tag.replace('/', '_')}.txt"] = text
            self.write_texts()

    def log_graph(self, module: nn.Module, example_input: Any = None) -> None:
        """Do nothing: a table cannot show a graph."""

    def resume_at(self, step: int) -> None:
        """Drop what was logged after `step`, so that a run that continues there continues the table."""
        self._rows = [row for row in self._rows if row["step"] <= step]
        self._flushed_step = step
        path = self._path
        if not (path.exists() or self._is_supervised):
            return
        try:
            with _open_table(path) as (columns, rows), open_replacement(path) as file:
                writer = _begin_table(file, columns)  # also under an agent, so that the file is this process's own
                self._kept = []
                for row in rows:
                    if int(row["step"]) <= step:
                        writer.writerow(row)
                    if int(row["step"]) == step:
                        self._kept.append(_as_text(row))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error}); move it, or give another version.") from None
        self._left_as, self._columns = _identify_file(path), columns

    def continue_as(self, version: int | str) -> None:
        """Continue in the table of a run that another process has opened."""
        super().continue_as(version)
        self._columns = None

    def save(self) -> None:
        """Write the rows that are still in memory; those that cannot be written stay there."""
        if self._is_taken_over():
            self.silence()
            self._rows = []
            warnings.warn(
                f"{self._path} has been written by another process while this one was stopped or cut off from the "
                "other nodes; this process stops writing to it.",
                stacklevel=2,
            )
        self.write_texts()
        if not self._rows:
            return
        self._flushed_step = self._rows[-1]["step"]  # wait as long for the next attempt as after a success
        path, rows = self.folder() / "metrics.csv", self._rows
        names = [name for row in rows for name in row]
        try:
            if self._columns is not None and path.exists() and set(names) <= set(self._columns):
                _append_rows(path, self._columns, rows)
            else:
                with _open_table(path) as (columns, written), open_replacement(path) as file:
                    wider = list(dict.fromkeys([*columns, *names]))
                    writer = _begin_table(file, wider)
                    writer.writerows(written)
                    writer.writerows(rows)
                self._columns = wider
        finally:
            self._left_as = _identify_file(path)
        self._rows = []

    def _is_taken_over(self) -> bool:
        """Return whether workers of a later round write the table, since this round's were believed lost."""
        if not self._is_supervised or self._is_silent:
            return False
        now = _identify_file(self._path)
        return now is not None and now != self._left_as

    def finalize(self, status: str) -> None:
        """Write the rows that are still in memory."""
        self.save()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_rows": [], "_texts": {}, "_columns": None}


def _identify_file(path: Path) -> tuple[int, int] | None:
    """Return an identity that changes if a file is replaced, or changed by another process; None without a file."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_size
    return None


def _append_rows(path: Path, columns: list[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Add rows to the end of a table; all or none if the disk is full."""
    size = path.stat().st_size
    try:
        with path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, columns).writerows(rows)
    except OSError:
        with suppress(OSError):
            os.truncate(path, size)
        raise


def _as_text(row: Mapping[str, object]) -> dict[str, str]:
    """Return a row as it would be read back."""
    return {name: str(value) for name, value in row.items() if value not in ("", None)}


def _begin_table(file: TextIO, columns: list[str]) -> csv.DictWriter[str]:
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    return writer


@contextmanager
def _open_table(path: Path) -> Iterator[tuple[list[str], Iterator[dict[str, Any]]]]:
    """Open a table, however large; yield its columns and rows, without a last line that a killed run left incomplete.

    Without a file it has no rows.
    """
    if not path.exists():
        yield ["step"], iter(())
        return
    try:
        with open_regular(path) as file:
            reader = csv.DictReader(_read_lines(file))
            yield list(reader.fieldnames or ["step"]), _check_rows(reader, path)
    except (ValueError, csv.Error) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{path} must be a table of a CSVLogger, found {format_as_line(str(error))}; move it, or give another "
            "version."
        ) from None


def _read_lines(file: BinaryIO) -> Iterator[str]:
    while (line := file.readline(_LONGEST_LINE)).endswith(b"\n"):
        yield line.decode("utf-8")
    if len(line) == _LONGEST_LINE:
        raise csv.Error(f"a line of more than {_LONGEST_LINE} bytes")
    if len(line) == file.tell():  # the only line
        line.decode("utf-8")


def _check_rows(rows: Iterable[dict[str, object]], path: Path) -> Iterator[dict[str, object]]:
    for row in rows:
        if not re.fullmatch(r"[0-9]{1,18}", str(row.get("step"))) or None in row:
            raise ConfigError(
                f"{path} must be a table of a CSVLogger, found the row {format_as_line(row)}; move it, or give another "
                "version."
            )
        yield row
