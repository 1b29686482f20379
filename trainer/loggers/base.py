"""Common code of loggers: the folder of a run, hyper-parameters as plain values, atomic replacement of files."""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import itertools
import math
import os
import re
import secrets
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO

from torch import Tensor

from ...callbacks.helpers.loggers import local_folder, tell_loggers
from ...callbacks.run import Logger
from ...common.errors import ConfigError
from ...common.storage import AnyPath, Mirror, StorePath, any_path, as_path, home_of
from ...strategies.state.from_environment import FromEnvironment

_LONGEST_TEXT: Final = 500
CLAIM: Final = ".claimed"
"""The object in a store that makes a version folder that of one run."""
NAMES_ONLY: Final = ("events.out.tfevents.*", "samples/*")
"""Files that a run that continues adds others to: of those before it needs the names."""


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; one that a program has put into ``sys.modules`` can."""
    return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None


class VersionFolder:
    """The folder of one run: ``<save_dir>/<name>/<version>/<sub_dir>``, created when something is first written.

    If no version is given, it is the next free one of ``version_0``, ``version_1``, ...; two runs that start at once
    get different ones. A number is a guess until `claim`: if another run takes it first, the next free one is claimed.
    """

    def __init__(
        self, save_dir: str | Path, name: str | None, version: int | str | None, sub_dir: str | Path | None = None
    ) -> None:
        for argument, value in (("name", name), ("version", version), ("sub_dir", sub_dir)):
            if value is not None and (".." in Path(str(value)).parts or Path(str(value)).is_absolute()):
                raise ConfigError(f"{argument}={value!r} must be a folder below save_dir; give a relative path.")
        self.save_dir = local_folder(any_path("save_dir", save_dir))
        home = home_of(self.save_dir)
        self._store_dir = home if isinstance(home, StorePath) else None
        self.name = name or ""
        self.sub_dir = None if sub_dir is None else str(sub_dir)
        self._version = version
        self._is_numbered_by_us = version is None
        self._is_claimed = False
        self._is_made = False

    @property
    def version(self) -> int | str:
        """The given version, or the next free number."""
        if self._version is None:
            self._version = self._next_free()
        return self._version

    @property
    def path(self) -> Path:
        """The folder, whether or not it exists."""
        return self._version_path / (self.sub_dir or "")

    @property
    def root(self) -> Path:
        """The folder of all versions."""
        return self.save_dir / self.name

    @property
    def store_root(self) -> StorePath | None:
        """The URL of the folder of all versions; None if they are local."""
        return None if self._store_dir is None else self._store_dir / self.name

    @property
    def home(self) -> StorePath | None:
        """The URL of the folder; None if it is local."""
        root = self.store_root
        return None if root is None else root / self._version_name / (self.sub_dir or "")

    @property
    def given_version(self) -> int | str | None:
        """The version, if it was given or claimed."""
        return None if self._is_numbered_by_us and not self._is_claimed else self._version

    @property
    def _version_name(self) -> str:
        version = self.version
        return version if isinstance(version, str) else f"version_{version}"

    @property
    def _version_path(self) -> Path:
        return self.root / self._version_name

    def claim(self) -> Path:
        """Create the folder and return it; from the second call on, only return it.

        Raises:
            ConfigError: if it cannot be created.
        """
        if not self._is_claimed:
            try:
                self._create()
            except OSError as error:
                raise ConfigError(
                    f"The logger cannot write to {str(self.path)!r} ({error.strerror}); give it another save_dir."
                ) from error
            self._is_claimed = True
        return self.path

    def drop_empty(self) -> None:
        """Remove the folder, which may be claimed again, if `claim` has made it and nothing was written into it."""
        if self._is_claimed and self._is_made:
            with suppress(OSError):  # it is not empty, or is gone
                for path in dict.fromkeys((self.path, self._version_path)):
                    path.rmdir()
                self._is_claimed = self._is_made = False

    def _create(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        store_root = self.store_root
        while self._is_numbered_by_us:
            if store_root is not None:
                if self._claim_in_store(store_root):
                    break
                before = self._version
                self._version = max(self._next_free(), before + 1 if isinstance(before, int) else 0)  # listings may lag
                continue
            try:
                os.mkdir(self._version_path)
                self._is_made = True
                break
            except FileExistsError:
                self._version = self._next_free()
        self._is_made = self._is_made or not self._version_path.exists()
        self.path.mkdir(parents=True, exist_ok=True)

    def _claim_in_store(self, root: StorePath) -> bool:
        """Take a version in the store, where runs on other machines may want it, too; return whether it was free."""
        if not root.store.write_if_absent(root / self._version_name / CLAIM, secrets.token_hex(16).encode()):
            return False
        if Mirror.has_sent(self.path):  # what is left of a run that was deleted from the store
            shutil.rmtree(self._version_path)
        return True

    def fetch(self) -> None:
        """Bring what a run that continues in this folder needs from the store, if it is there."""
        home = self.home
        if home is not None and not self._is_numbered_by_us:
            Mirror(self.path, home, names_only=NAMES_ONLY).fetch()

    def continue_at(self, path: AnyPath) -> None:
        """Continue the run whose folder contains `path`, if it has this name and no version was given or claimed."""
        root = self.store_root
        base: AnyPath = self.root.resolve() if root is None else root
        path = home_of(path) if root is not None and isinstance(path, Path) else path.resolve()
        if not self._is_numbered_by_us or self._is_claimed or base not in path.parents:
            return
        match = re.fullmatch(r"version_(\d+)", path.relative_to(str(base)).parts[0])
        if match:
            self._version, self._is_numbered_by_us = int(match[1]), False

    def continue_as(self, version: int | str) -> None:
        """Continue in the folder of this version, which another process has claimed."""
        self._version, self._is_numbered_by_us, self._is_claimed = version, False, False

    def _next_free(self) -> int:
        root = self.store_root
        try:
            names = os.listdir(self.root) if root is None else [entry.name for entry in root.store.list(root)]
        except (FileNotFoundError, NotADirectoryError):
            return 0
        numbers = [int(match[1]) for name in names if (match := re.fullmatch(r"version_(\d+)", name))]
        return max(numbers, default=-1) + 1


class FolderLogger:
    """Base of loggers that write into version folders: the folder, the names, and the hyper-parameters.

    A logger is pickled for the processes of a run, where rank 0's writes; rows in memory and open files are left out.
    """

    _is_silent = False

    def __init__(self, folder: VersionFolder, prefix: str) -> None:
        self._folder = folder
        self._prefix = prefix
        self._hparams: dict[str, object] = {}
        self._texts: dict[str, str] = {}
        """The files that have yet to be written, by name."""

    @property
    def name(self) -> str:
        """The name of the folder of all versions; empty if they are in `save_dir` itself."""
        return self._folder.name

    @property
    def version(self) -> int | str:
        """The given version, or the next free number."""
        return self._folder.version

    @property
    def save_dir(self) -> str:
        """The folder that contains the folders of all names."""
        return str(self._folder.save_dir)

    @property
    def root_dir(self) -> str:
        """The folder of all versions."""
        return str(self._folder.root)

    @property
    def sub_dir(self) -> str | None:
        """The subfolder of the version's folder for the files, if any."""
        return self._folder.sub_dir

    @property
    def log_dir(self) -> str:
        """The folder of this run."""
        return str(self._folder.path)

    def named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics as floats, under their prefixed names."""
        return add_prefix(metrics, self._prefix)

    def keep_hyperparams(self, params: Mapping[str, Any] | Namespace) -> dict[str, Any]:
        """Put these hyper-parameters and those of earlier calls into ``hparams.yaml``, and return them all."""
        import yaml

        self._hparams.update(to_plain_values(vars(params) if isinstance(params, Namespace) else params))
        text = yaml.safe_dump(self._hparams, sort_keys=False, allow_unicode=True)
        self._texts["hparams.yaml"] = text
        return self._hparams

    def write_texts(self) -> None:
        """Write the files that have yet to be written; one that cannot be written is kept for later."""
        if self._texts:
            folder = self.folder()
            for name, text in list(self._texts.items()):
                replace_text(folder / name, text)
                del self._texts[name]

    def folder(self) -> Path:
        """Return the folder of the run, created again if it was deleted."""
        folder = self._folder.claim()
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def settle(self) -> None:
        """Make a relative folder that of now, when a run starts."""
        self._folder.save_dir = self._folder.save_dir.absolute()

    def open(self) -> None:
        """Create the folder of the run; a version number that was not given is final from then on."""
        self._folder.claim()
        self._folder.fetch()

    def drop_empty_folder(self) -> None:
        """Remove the folder of a run that has failed before anything was written into it."""
        if not self._is_silent:
            self._folder.drop_empty()

    @property
    def url(self) -> str | None:
        """The URL to which the folder of this run is copied; None if `save_dir` is none."""
        home = self._folder.home
        return None if home is None else str(home)

    @property
    def store_dir(self) -> StorePath | None:
        """The URL of the folder of all versions; None if `save_dir` is none."""
        return self._folder.store_root

    @property
    def place(self) -> str:
        """A text that differs between loggers that write to different folders; no store is asked for it."""
        root = self._folder.store_root
        return self.log_dir if root is None else f"{root}|{self._folder.given_version}|{self.sub_dir}"

    def continue_run(self, checkpoint: AnyPath) -> None:
        """Continue in the folder of the run that wrote `checkpoint`, unless a version was given."""
        self._folder.continue_at(checkpoint)

    def continue_in(self, folder: AnyPath) -> None:
        """Continue in a folder that a checkpoint names, if it is still there and one of this logger's."""
        if folder.is_dir():
            self._folder.continue_at(folder)

    def continue_as(self, version: int | str) -> None:
        """Continue in the folder of a run that another process has opened: rank 0, or the workers of a `fit`."""
        self._folder.continue_as(version)

    def silence(self) -> None:
        """Write nothing from now on: another process writes the same data."""
        self._is_silent = True


def folder_runs(loggers: Sequence[Logger]) -> list[dict[str, str]]:
    """Return the entries of a checkpoint that name the folders of these loggers: it may lie in the first one's only."""
    return [
        {
            "type": type(logger).__name__,
            "name": str(logger.name),
            "version": logger.url or os.path.abspath(logger.log_dir),
        }
        for logger in loggers
        if isinstance(logger, FolderLogger)
    ]


def continue_in_folders(loggers: Sequence[Logger], runs: Sequence[Mapping[str, str]]) -> None:
    """Make loggers continue in the folders that a checkpoint names for their type, where these are theirs."""
    in_folders = [logger for logger in loggers if isinstance(logger, FolderLogger)]
    for logger, run in itertools.product(in_folders, runs):
        if run["type"] == type(logger).__name__:
            logger.continue_in(as_path(run["version"]))


def add_prefix(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return metrics as floats, under their names with the prefix and ``-`` before them, if there is a prefix."""
    start = f"{prefix}-" if prefix else ""
    return {start + name: float(value) for name, value in metrics.items()}


def to_plain_values(value: Any) -> Any:
    """Return hyper-parameters as YAML types: dicts, lists, numbers, bools, strings and None."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, FromEnvironment):
        return value.interpolation
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): to_plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain_values(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain_values(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        return f"{value.__module__}.{value.__qualname__}"
    text = str(value)
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."


def flatten_params(params: Mapping[str, object], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Return values of `to_plain_values` flattened to one level (``optimizer/lr``), as finite numbers or text."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in params.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten_params(value, f"{name}/"))
        elif isinstance(value, bool | int | float) and math.isfinite(value):
            flat[name] = value
        else:
            flat[name] = str(value)
    return flat


def replace_text(path: Path, text: str) -> None:
    """Replace a file atomically: readers see the old or the new text, also if the run is killed here."""
    with open_replacement(path) as file:
        file.write(text)


@contextmanager
def open_replacement(path: Path) -> Iterator[TextIO]:
    """Open a file for text that replaces the one at `path` when the context ends without an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            yield file
        os.replace(temporary, path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def continue_loggers(loggers: Sequence[Logger], versions: Sequence[int | str | None]) -> None:
    """Make loggers continue in the folders that they have on rank 0."""
    for logger, version in zip(loggers, versions, strict=True):
        if version is not None:
            tell_loggers([logger], "continue_as", version)
