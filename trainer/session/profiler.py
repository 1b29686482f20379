"""Profiler: measures the actions of a run, and shows them as a table."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import ClassVar, Final, ParamSpec, TypeVar

from ...callbacks.helpers.loggers import local_folder
from ...common.console import say
from ...common.errors import ConfigError
from ...common.storage import any_path

P = ParamSpec("P")
R = TypeVar("R")

_NOTHING: Final = nullcontext()


class Profiler(ABC):
    """Base of profilers, as in Lightning: a subclass defines `start`, `stop` and `summary`, or overrides `profile`.

    The trainer profiles ``fetch``, ``training_step``, ``backward``, ``optimizer_step``, ``validation_step`` and
    ``checkpoint``; a module adds its own with ``with self.trainer.profiler.profile("decode"): ...``. A profiler can
    serve several runs, one after the other.

    Args:
        dirpath: the folder of its files, or its URL; by default that of the run.
        filename: the name of the files, between the stage and the rank; if given, the summary is not printed.
    """

    is_active: ClassVar[bool] = True
    """Whether it measures anything."""
    dirpath: str | Path | None = None
    filename: str | None = None
    _folder = Path()
    _stage: str | None = None
    _rank: int | None = None

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None) -> None:
        if dirpath is not None:
            any_path("dirpath", dirpath)
        self.dirpath, self.filename = dirpath, filename

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin to measure a run; files go to `dirpath`, else to `log_dir`, each rank's under its own name."""
        self._stage, self._rank = stage, local_rank
        self._folder = local_folder(self.dirpath or log_dir or ".").absolute()

    @abstractmethod
    def start(self, action_name: str) -> None:
        """Begin to measure an action."""

    @abstractmethod
    def stop(self, action_name: str) -> None:
        """End the measurement of an action."""

    def profile(self, action_name: str) -> AbstractContextManager[object]:
        """Return a context whose time counts toward the action; called several times per step."""
        return self._started_and_stopped(action_name)

    @contextmanager
    def _started_and_stopped(self, action_name: str) -> Iterator[str]:
        self.start(action_name)
        try:
            yield action_name
        finally:
            self.stop(action_name)

    def measured(self, action_name: str, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function each of whose calls is profiled."""

        def profiled(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.profile(action_name):
                return function(*args, **kwargs)

        return profiled

    def step(self) -> None:
        """Note that an optimizer step has ended."""

    def summary(self) -> str:
        """Return the measurements as text, which may be empty."""
        return ""

    def describe(self) -> None:
        """Append the summary to this rank's file; rank 0 prints it, unless there is a `filename`."""
        summary = self.summary()
        if not summary:
            return
        path = self._path("txt")
        with path.open("a", encoding="utf-8") as file:
            file.write(summary + "\n\n")
        if self.filename is None and not self._rank:
            say(summary)

    def teardown(self, stage: str | None = None) -> None:
        """End the measurement of a run."""

    @contextmanager
    def running(self, stage: str, local_rank: int | None, log_dir: str | None) -> Iterator[None]:
        """Measure a run, from `setup` to `teardown`."""
        self.setup(stage, local_rank, log_dir)
        try:
            yield
        finally:
            self.describe()
            self.teardown(stage)

    def _path(self, extension: str, action_name: str | None = None) -> Path:
        folder = local_folder(self.dirpath or self._folder)  # a profiler may be used without a trainer
        folder.mkdir(parents=True, exist_ok=True)
        rank = None if self._rank is None else str(self._rank)
        name = "-".join(filter(None, (self._stage, self.filename or "profile", rank, action_name)))
        return folder / (re.sub(r"[^\w.+-]+", "_", name) + f".{extension}")


class PassThroughProfiler(Profiler):
    """Measures nothing, at 0.2 us per action."""

    is_active: ClassVar[bool] = False

    def start(self, action_name: str) -> None:
        """Do nothing."""

    def stop(self, action_name: str) -> None:
        """Do nothing."""

    def profile(self, action_name: str) -> AbstractContextManager[object]:
        """Return a shared empty context."""
        return _NOTHING

    def measured(self, action_name: str, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function itself."""
        return function


class SimpleProfiler(Profiler):
    """Measures how often and how long each action ran, in host time: work queued on a GPU counts where it is awaited.

    Args:
        dirpath: as in `Profiler`.
        filename: as in `Profiler`.
        extended: also show the number of calls and the fraction of the whole run.

    Example::

        Trainer(max_epochs=1, profiler="simple").fit(module, train_loader)
        Trainer(max_epochs=1, profiler=SimpleProfiler(dirpath="runs", filename="times")).fit(module, train_loader)
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename)
        self.extended = extended
        self._timers: dict[str, _Timer] = {}
        self._started = perf_counter()

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin a new table."""
        super().setup(stage, local_rank, log_dir)
        self._timers = {}
        self._started = perf_counter()

    def profile(self, action_name: str) -> AbstractContextManager[object]:
        """Return the timer of the action."""
        return self._timer(action_name)

    def _timer(self, action_name: str) -> _Timer:
        timer = self._timers.get(action_name)
        if timer is None:
            timer = self._timers[action_name] = _Timer()
        return timer

    def start(self, action_name: str) -> None:
        """Start the timer of the action."""
        self._timer(action_name).__enter__()

    def stop(self, action_name: str) -> None:
        """Stop the timer of the action.

        Raises:
            ConfigError: if it was not started.
        """
        timer = self._timers.get(action_name)
        if timer is None or not timer.is_running:
            raise ConfigError(
                f"Attempting to stop recording an action ({action_name}) that was never started; start it first."
            )
        timer.__exit__()

    def summary(self) -> str:
        """Return the table, the costliest action first; an action inside another counts in both."""
        elapsed = perf_counter() - self._started
        rows = [_format_row(self.extended, "action", "calls", "mean (ms)", "total (s)", "%")]
        rows.append("-" * len(rows[0]))
        for action, timer in sorted(self._timers.items(), key=lambda item: -item[1].total):
            mean, percentage = 1000 * timer.total / max(timer.calls, 1), 100 * timer.total / elapsed
            numbers = f"{timer.calls}", f"{mean:.4f}", f"{timer.total:.3f}", f"{percentage:.1f}"
            rows.append(_format_row(self.extended, action, *numbers))
        rows.append(_format_row(self.extended, "the whole run", "", "", f"{elapsed:.3f}", "100.0"))
        return "\n".join(rows)


def _format_row(extended: bool, action: str, calls: str, mean: str, total: str, percentage: str) -> str:
    if not extended:
        return f"{action:<28}{mean:>14}{total:>14}"
    return f"{action:<28}{calls:>10}{mean:>14}{total:>14}{percentage:>8}"


class _Timer:
    """The calls of one action; a reentrant context."""

    __slots__ = ("_starts", "calls", "total")

    def __init__(self) -> None:
        self.calls = 0
        self.total = 0.0
        self._starts: list[float] = []

    def __enter__(self) -> None:
        self._starts.append(perf_counter())

    @property
    def is_running(self) -> bool:
        return bool(self._starts)

    def __exit__(self, *_: object) -> None:
        self.total += perf_counter() - self._starts.pop()
        self.calls += 1
