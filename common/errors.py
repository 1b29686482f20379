"""Exceptions that Echelon raises on purpose; every room may import them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EchelonError(Exception):
    """The base of all errors that Echelon raises on purpose."""


class ConfigError(EchelonError, ValueError):
    """A setting, or a combination of settings, is not possible."""


class ModuleError(EchelonError, RuntimeError):
    """The user's module lacks, returns or does something that the trainer cannot handle."""


class DataError(EchelonError, RuntimeError):
    """A loader or a batch cannot be used for training or evaluation."""


class RunError(EchelonError, RuntimeError):
    """The trainer cannot carry out a call in its current state."""


class NotSetUpError(RunError, AttributeError):
    """An attribute was read before a run set it up; also an `AttributeError`, so that `hasattr` works."""


class ProcessError(RunError):
    """A process of a run did not start, died, or lost its connection to the others; the message names its rank."""

    ranks: tuple[int, ...] = ()
    """The ranks at fault, if known."""
    is_of_server: bool = False
    """Whether that process is a parameter server, whose failure possibly no other rank reports."""

    @classmethod
    def of_ranks(cls, message: str, *ranks: int) -> ProcessError:
        """Return an error for ranks that died; the message names them."""
        error = cls(message)
        error.ranks = ranks
        return error

    @classmethod
    def of_server(cls, message: str) -> ProcessError:
        """Return an error for a parameter server that died, failed, or does not answer; the message names it."""
        error = cls(message)
        error.is_of_server = True
        return error


class CollectiveError(RunError):
    """Ranks did not call the same collective; the message is a table of what each rank called, and where."""


class NonFiniteError(EchelonError, ArithmeticError):
    """A loss or a gradient became NaN or infinite."""


class CheckpointError(EchelonError, RuntimeError):
    """A checkpoint is missing, damaged, or from another program or module; or it cannot be written."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """Nothing is at the path of a checkpoint; also a `FileNotFoundError`, as opening a missing file raises it."""


class StoreError(EchelonError, OSError):
    """An object store does not answer, refuses, or keeps failing; also an `OSError`, as a disk would raise it."""


class MissingDependencyError(EchelonError, ImportError):
    """An optional package that a feature needs is not installed; the message gives the command that installs it."""


def not_set_up(owner: object, name: str) -> AttributeError:
    """Return the error for an attribute that a strategy lacks: a `NotSetUpError` if its class declares it."""
    kind = type(owner).__name__
    declared = {each for base in type(owner).mro() for each in (*vars(base), *vars(base).get("__annotations__", ()))}
    if name.startswith("__") or name not in declared:
        return AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)
    return NotSetUpError(
        f"strategy.{name.removeprefix('_')} must be set up by a run, found none yet in this process; use it in a hook "
        "of fit, or once setup has succeeded."
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the known name closest to `word`, or a list of all names if none is close."""
    names = sorted(set(known))
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f" Did you mean {near[0]!r}?"
    return f" Choose one of: {', '.join(names)}." if names else ""
