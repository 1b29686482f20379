"""FollowedFolder: the folder of a logger whose class overrides ``name``, ``version``, ``log_dir`` or the like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from ...trainer.loggers.base import FolderLogger, VersionFolder

_FOLLOWED: Final = ("name", "version", "save_dir", "root_dir", "sub_dir", "log_dir")
_PACKAGE: Final = __name__.partition(".")[0]
T = TypeVar("T")


def follow(logger: FolderLogger, folder: VersionFolder) -> VersionFolder:
    """Return the folder of a logger, as the properties say that its class overrides."""
    overridden = {name for name in _FOLLOWED if _owner(type(logger), name).partition(".")[0] != _PACKAGE}
    return FollowedFolder(folder, logger, overridden) if overridden else folder


def _owner(kind: type, name: str) -> str:
    return next(each.__module__ for each in kind.__mro__ if name in vars(each))


class FollowedFolder(VersionFolder):
    """A version folder that asks the logger for what its class overrides.

    An override may call ``super()``, or read another of the properties: it then gets the folder's own.

    Args:
        folder: the folder that the logger was made with.
        logger: the logger.
        overridden: the properties.
    """

    def __init__(self, folder: VersionFolder, logger: FolderLogger, overridden: set[str]) -> None:
        self.__dict__.update(vars(folder))
        self._logger, self._overridden, self._asked = logger, overridden, set[str]()
        if overridden & {"version", "log_dir"}:
            self._is_numbered_by_us = False

    def _of_logger(self, name: str, own: Callable[[], T]) -> T:
        if name not in self._overridden or name in self._asked:
            return own()
        self._asked.add(name)
        try:
            found: T = getattr(self._logger, name)
            return found
        finally:
            self._asked.remove(name)

    def _create(self) -> None:
        if self._is_numbered_by_us:
            super()._create()
            return
        self._is_made = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the folder of all versions."""
        return self._of_logger("name", lambda: self.__dict__["name"]) or ""

    @property
    def save_dir(self) -> Path:
        """The folder that contains the folders of all names."""
        return Path(self._of_logger("save_dir", lambda: self.__dict__["save_dir"]))

    @save_dir.setter
    def save_dir(self, value: Path) -> None:
        self.__dict__["save_dir"] = value

    @property
    def sub_dir(self) -> str | None:  # type: ignore[override]
        """The subfolder of the version's folder."""
        own: str | None = self._of_logger("sub_dir", lambda: self.__dict__["sub_dir"])
        return own

    @property
    def version(self) -> int | str:
        """The version."""
        own: int | str = self._of_logger("version", lambda: VersionFolder.version.fget(self))  # type: ignore[attr-defined]
        return own

    @property
    def root(self) -> Path:
        """The folder of all versions."""
        return Path(self._of_logger("root_dir", lambda: VersionFolder.root.fget(self)))  # type: ignore[attr-defined]

    @property
    def path(self) -> Path:
        """The folder of this run."""
        return Path(self._of_logger("log_dir", lambda: VersionFolder.path.fget(self)))  # type: ignore[attr-defined]
