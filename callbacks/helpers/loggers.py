"""Calls to optional methods of loggers, and the folder of a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from ...common.errors import ConfigError
from ...common.storage import AnyPath, StorePath, as_path, spool_folder
from ..run import Logger

OptionalMethod = Literal[
    "settle",
    "open",
    "continue_run",
    "continue_saved",
    "continue_as",
    "resume_at",
    "silence",
    "log_text",
    "log_graph",
    "log_image",
    "save",
    "after_save_checkpoint",
    "finalize",
    "drop_empty_folder",
]

_WHERE_A_RUN_BEGINS: Final = ("open", "continue_run", "continue_saved", "continue_as", "resume_at")
_REQUIRED: Final = ("name", "version", "log_metrics", "log_hyperparams")


def refuse_incomplete(logger: object) -> None:
    """Check that an object with some of a logger's methods has all that are required.

    Raises:
        ConfigError: if it lacks one; the message names it.
    """
    if isinstance(logger, type):
        name = logger.__name__
        raise ConfigError(f"logger must be a logger, got the class {name}; write logger={name}(...).")
    # the class first: a property such as `version` may have to ask a store
    missing = [name for name in _REQUIRED if not (hasattr(type(logger), name) or hasattr(logger, name))]
    if 0 < len(missing) < len(_REQUIRED):
        raise ConfigError(
            f"logger must have {', '.join(_REQUIRED)}, got a {type(logger).__name__} without {', '.join(missing)}; "
            "define these."
        )


def tell_loggers(loggers: Iterable[Logger], method: OptionalMethod, *args: object) -> None:
    """Call a method of every logger that has it.

    Raises:
        ConfigError: for an OSError while a run begins; later ones become warnings.
    """
    for logger in loggers:
        call = getattr(logger, method, None)
        if call is not None:
            with _explain_failed_start(logger) if method in _WHERE_A_RUN_BEGINS else outlives_disk_errors(logger):
                call(*args)


@contextmanager
def _explain_failed_start(logger: Logger) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{type(logger).__name__} cannot start ({error}); check its folder or connection, or give another logger."
        ) from error


@contextmanager
def outlives_disk_errors(logger: Logger) -> Iterator[None]:
    """Turn an OSError into a warning, which Python shows once: training and checkpoints continue."""
    try:
        yield
    except OSError as error:
        warnings.warn(
            f"{type(logger).__name__} cannot write ({error}); training continues. Free some space, or check the folder "
            "or connection: Echelon's loggers write what they have kept at the next checkpoint, or when the run ends.",
            stacklevel=3,
        )


def run_folder(logger: Logger, root_dir: str | Path) -> Path:
    """Return the folder of a logger's run: its ``log_dir``, else one below its ``save_dir``, else below `root_dir`.

    It is local; of a URL, it is the folder that is copied there.
    """
    log_dir, save_dir = (getattr(logger, name, None) for name in ("log_dir", "save_dir"))
    if isinstance(log_dir, str | Path):
        return local_folder(log_dir)
    parent = save_dir if isinstance(save_dir, str | Path) else root_dir
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return local_folder(parent).expanduser() / str(logger.name or "") / version


def local_folder(path: str | AnyPath) -> Path:
    """Return the local folder of a run's files; for a URL that in which they are written before they are copied."""
    place = as_path(path)
    return spool_folder(place) if isinstance(place, StorePath) else place
