"""TrackerLogger: the base of loggers for experiment trackers, where points cannot be deleted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

from torch import Tensor

from ...callbacks.helpers.loggers import tell_loggers
from ...callbacks.run import Logger
from ...common.errors import ConfigError
from ...common.storage import AnyPath, StorePath, as_path, local_copy, local_folder
from .base import add_prefix

LogModel = bool | Literal["all"]

_LARGEST: Final = 1.79e308
"""Some stores represent an infinite value by a number above this."""


class Saver(Protocol):
    """A ModelCheckpoint as seen by loggers that log checkpoints."""

    monitor: str | None
    mode: str
    save_top_k: int

    @property
    def kept_paths(self) -> list[str]:
        """The paths of all kept checkpoints."""

    @property
    def best_model_path(self) -> str:
        """The path of the best one."""

    @property
    def best_k_models(self) -> dict[str, Tensor]:
        """The monitored value of each of the top k, by path."""


_MANIFEST: Final = "manifest.json"
"""The object of a checkpoint in a store that names the folder of its files."""


@dataclass(frozen=True)
class LoggedCheckpoint:
    """A checkpoint for the tracker: its path, and the information that the tracker shows with it."""

    path: AnyPath
    aliases: list[str]
    metadata: dict[str, object]

    def at_hand(self) -> Path:
        """Return it as a local folder or file; of one in a store, a copy that is deleted when this process ends."""
        if not isinstance(self.path, StorePath):
            return self.path
        if self.path.is_file():
            return local_copy(self.path)
        return local_folder(self.path / json.loads((self.path / _MANIFEST).read_bytes())["folder"])


class TrackerLogger:
    """Base of loggers for experiment trackers: the id of the run, the points that it already has, and checkpoints.

    A tracker keeps every point that it gets. To keep one curve when a run is resumed from a checkpoint, the logger
    leaves out points that the run had already logged after that checkpoint with the same value. A logger is pickled for
    the processes of a run, where rank 0's writes; the connection is left out.
    """

    _is_silent = False
    _is_copy = False
    """Whether this is the logger of a process that was started for one run."""

    def __init__(self, run_id: str | None, prefix: str, log_model: LogModel) -> None:
        if log_model not in (True, False, "all"):
            raise ConfigError(f"log_model must be True, False or 'all', got {log_model!r}; choose one.")
        self._run_id = run_id
        self._is_id_given = run_id is not None
        self._prefix = prefix
        self._log_model: LogModel = log_model
        self._known: dict[int, dict[str, float]] = {}
        """The values that the tracker already has after the step that the run resumes from, by step."""
        self._savers: list[Saver] = []
        self._pending: dict[str, LoggedCheckpoint] = {}
        """The checkpoints that have yet to be logged, by path: they may not be on disk yet."""
        self._logged: set[str] = set()

    @property
    def name(self) -> str:
        """The name of the project or experiment, and of the folder of its runs' checkpoints."""
        raise NotImplementedError

    @property
    def version(self) -> str | None:
        """The id of the run; None before it begins."""
        return self._run_id

    def open(self) -> None:
        """Start the run, or continue it."""
        raise NotImplementedError

    def continue_saved(self, version: str) -> None:
        """Continue the run that a checkpoint names, unless an id was given or a run has begun."""
        self._run_id = self._run_id or version

    def continue_as(self, version: int | str) -> None:
        """Continue a run that another process has begun: rank 0, or the workers of a `fit`."""
        self._run_id = str(version)

    def silence(self) -> None:
        """Write nothing from here on: another process writes the same."""
        self._is_silent = True

    def numbers(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Return metrics as floats, under their prefixed names, without those that the tracker already has."""
        known = self._known.get(step, {})
        values = add_prefix(metrics, self._prefix)
        return {name: value for name, value in values.items() if not (name in known and is_same(value, known[name]))}

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def after_save_checkpoint(self, checkpoint_callback: Saver) -> None:
        """Note the checkpoints of a ModelCheckpoint that has just begun to write one; earlier ones are on disk."""
        if self._is_silent or not self._log_model:
            return
        self._log_pending()
        if checkpoint_callback not in self._savers:
            self._savers.append(checkpoint_callback)
        if self._log_model == "all" or checkpoint_callback.save_top_k == -1:
            self._note_checkpoints(checkpoint_callback)

    def log_checkpoints(self, status: str) -> None:
        """Log the checkpoints due at the end of a run; nothing if it failed or was interrupted."""
        if status == "success":
            for saver in self._savers:
                self._note_checkpoints(saver)
            self._log_pending()
        self._savers, self._pending = [], {}

    def upload(self, checkpoint: LoggedCheckpoint) -> None:
        """Copy a checkpoint, a folder or one file, to the tracker."""
        raise NotImplementedError

    def _note_checkpoints(self, saver: Saver) -> None:
        scores = saver.best_k_models
        for path in saver.kept_paths:
            if path in self._logged:
                continue
            metadata: dict[str, object] = {
                "monitor": saver.monitor,
                "mode": saver.mode,
                "original_filename": Path(path).name,
            }
            if saver.monitor and path in scores:
                metadata["score"] = scores[path].item()
            aliases = ["latest", "best"] if path == saver.best_model_path else ["latest"]
            self._pending[path] = LoggedCheckpoint(as_path(path), aliases, metadata)

    def _log_pending(self) -> None:
        for path, checkpoint in list(self._pending.items()):
            if checkpoint.path.exists():
                self.upload(checkpoint)
                self._logged.add(path)
                del self._pending[path]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_known": {}, "_savers": [], "_pending": {}, "_is_copy": True}


def tracker_runs(loggers: Sequence[Logger]) -> list[dict[str, str]]:
    """Return the entry of a checkpoint that names this run in each tracker."""
    return [
        {"type": type(logger).__name__, "name": str(logger.name), "version": str(logger.version)}
        for logger in loggers
        if hasattr(logger, "continue_saved") and logger.version is not None
    ]


def continue_saved_runs(loggers: Sequence[Logger], runs: Sequence[Mapping[str, str]]) -> None:
    """Make tracker loggers continue the runs that a checkpoint names, each the next one of its type and name."""
    left = list(runs)
    for logger in loggers:
        of_it = [run for run in left if (run["type"], run["name"]) == (type(logger).__name__, str(logger.name))]
        if of_it:
            tell_loggers([logger], "continue_saved", of_it[0]["version"])
            left.remove(of_it[0])


def is_same(value: float, stored: float) -> bool:
    """Return whether a value reads back as `stored`."""
    if math.isnan(value) or math.isnan(stored):
        return math.isnan(value) and math.isnan(stored)
    return value == stored or (math.isinf(value) and abs(stored) > _LARGEST and (value > 0) == (stored > 0))


@contextmanager
def as_os_error() -> Iterator[None]:
    """Raise errors of a tracker's client as OSError, which training turns into a warning."""
    try:
        yield
    except Exception as error:  # its own errors, its database's, the network's
        raise OSError(str(error) or type(error).__name__) from error
