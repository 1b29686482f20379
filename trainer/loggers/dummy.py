"""DummyLogger: accepts every call and writes nothing, so that a ``fast_dev_run`` can use ``self.logger`` as usual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self


class DummyExperiment:
    """Accept every method call and indexing, and do nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):  # copy and pickle look for missing attributes
            raise AttributeError(name)
        return _do_nothing

    def __getitem__(self, index: object) -> Self:
        return self

    def __setitem__(self, index: object, value: object) -> None:
        """Do nothing."""


class DummyLogger(DummyExperiment):
    """A logger without a folder; it also accepts methods that only some loggers have."""

    name = ""
    version = ""
    save_dir = None
    log_dir = None

    @property
    def experiment(self) -> DummyExperiment:
        """An object that accepts every call."""
        return DummyExperiment()

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


def _do_nothing(*args: object, **kwargs: object) -> None:
    """Stand in for any method."""
