"""Profilers that look inside actions, at each function or each operator, and the names of all profilers."""

from __future__ import annotations

import cProfile
import io
import pstats
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch

from ...common.errors import ConfigError, did_you_mean
from .profiler import PassThroughProfiler, Profiler, SimpleProfiler


class AdvancedProfiler(Profiler):
    """Measures every function called inside each action, with ``cProfile``: a long report, and a much slower run.

    When one action runs inside another, only the inner one is measured.

    Args:
        dirpath: as in `Profiler`.
        filename: as in `Profiler`.
        line_count_restriction: how many functions of an action to show: a number of lines, or a fraction of them.
        dump_stats: also write one file per action, for ``pstats``.

    Example::

        Trainer(max_epochs=1, profiler=AdvancedProfiler(dirpath="runs", filename="functions")).fit(module, train_loader)
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        line_count_restriction: float = 1.0,
        dump_stats: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self.line_count_restriction, self.dump_stats = line_count_restriction, dump_stats
        self._profiles: dict[str, cProfile.Profile] = {}
        self._running: list[str] = []

    def start(self, action_name: str) -> None:
        """Begin to measure an action, and pause the enclosing one."""
        if self._running:
            self._profiles[self._running[-1]].disable()
        self._running.append(action_name)
        self._profiles.setdefault(action_name, cProfile.Profile()).enable()

    def stop(self, action_name: str) -> None:
        """End the measurement of an action, and resume the enclosing one.

        Raises:
            ConfigError: if it is not the one that was started last.
        """
        if not self._running or self._running[-1] != action_name:
            raise ConfigError(
                f"Attempting to stop recording an action ({action_name}) that was not started last, got "
                f"{self._running[-1:]}; start it."
            )
        self._profiles[self._running.pop()].disable()
        if self._running:
            self._profiles[self._running[-1]].enable()

    def summary(self) -> str:
        """Return a table of functions for each action; write the statistics if `dump_stats` is set."""
        tables = []
        for action_name, profile in self._profiles.items():
            if self.dump_stats:
                profile.dump_stats(self._path("prof", action_name))
            text = io.StringIO()
            limit = self.line_count_restriction
            pstats.Stats(profile, stream=text).strip_dirs().sort_stats("cumulative").print_stats(limit)
            tables.append(f"Profile of {action_name}\n{text.getvalue().strip()}")
        return "\n\n".join(tables)

    def teardown(self, stage: str | None = None) -> None:
        """Forget the run: cProfile's data cannot be sent to other processes."""
        self._profiles, self._running = {}, []


class PyTorchProfiler(Profiler):
    """Records every operator of a few steps with ``torch.profiler``, on the host and on the accelerator.

    Each recording is written to ``rank<rank>.<step>.pt.trace.json``; TensorBoard and https://ui.perfetto.dev open it.

    Args:
        dirpath: the folder of the recordings and of the table, by default the run's.
        filename: the name of the table's file; None to print the table.
        wait: steps to skip before each recording.
        warmup: steps to profile without keeping the result, after those.
        active: steps to record.
        repeat: the number of recordings; 0 for as many as the run has room for.
        row_limit: the operators that the table shows.
        sort_by_key: the column by which they are ranked.
        record_shapes: record the shapes of the operators' inputs.
        profile_memory: record what is allocated and freed.
        with_stack: record the lines of code that call the operators.

    Raises:
        ConfigError: for a schedule that records nothing.

    Example::

        profiler = PyTorchProfiler(dirpath="runs", wait=0, warmup=1, active=2)
        Trainer(max_epochs=1, profiler=profiler).fit(module, train_loader)
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        row_limit: int = 20,
        sort_by_key: str = "self_cpu_time_total",
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        super().__init__(dirpath, filename)
        self._table: dict[str, object] = {"sort_by": sort_by_key, "row_limit": row_limit}
        smallest = {"wait": (wait, 0), "warmup": (warmup, 0), "active": (active, 1), "repeat": (repeat, 0)}
        for name, (value, least) in smallest.items():
            if value < least:
                raise ConfigError(f"PyTorchProfiler: {name} must be >= {least}, got {value}.")
        self._schedule = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        self._record_shapes = record_shapes
        self._profile_memory = profile_memory
        self._with_stack = with_stack
        self._profile: torch.profiler.profile | None = None
        self._contexts: dict[str, torch.profiler.record_function] = {}
        self._summary = ""

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin to count steps; the recording itself begins when the schedule says so."""
        super().setup(stage, local_rank, log_dir)
        self._summary = ""
        self._profile = torch.profiler.profile(**self._options())
        self._profile.start()

    def _options(self) -> dict[str, Any]:
        """Return the arguments of torch's profiler."""
        return {
            "schedule": torch.profiler.schedule(**self._schedule),
            "on_trace_ready": self._write,
            "record_shapes": self._record_shapes,
            "profile_memory": self._profile_memory,
            "with_stack": self._with_stack,
        }

    def profile(self, action_name: str) -> AbstractContextManager[object]:
        """Return a context that groups its operators under the action's name in the trace."""
        return torch.profiler.record_function(action_name)

    def start(self, action_name: str) -> None:
        """Begin the action in the trace."""
        self._contexts[action_name] = torch.profiler.record_function(action_name)
        self._contexts[action_name].__enter__()

    def stop(self, action_name: str) -> None:
        """End the action in the trace."""
        self._contexts.pop(action_name).__exit__(None, None, None)

    def step(self) -> None:
        """Move on in the schedule; at the end of a recording, write it."""
        if self._profile is None:
            return
        with warnings.catch_warnings():
            # each recording is written when it ends, so torch may forget it when the next begins
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            self._profile.step()

    def summary(self) -> str:
        """End a recording that is still running, and return the costliest operators of the last one."""
        if self._profile is None:
            return ""
        steps = self._profile.step_num
        self._profile.stop()
        self._profile = None
        if self._summary:
            return self._summary
        skipped = self._schedule["wait"] + self._schedule["warmup"]
        return (
            f"PyTorchProfiler recorded nothing: the run took {steps} optimizer steps, and wait + warmup = {skipped}; "
            "run for longer, or give PyTorchProfiler(wait=0, warmup=0)."
        )

    def _write(self, profile: torch.profiler.profile) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank{self._rank or 0}.{profile.step_num}.pt.trace.json"
        profile.export_chrome_trace(str(path))
        table = profile.key_averages().table(**self._table)
        self._summary = f"{table}\nTrace: {path} (open it in https://ui.perfetto.dev)"


_BY_NAME: Final[dict[str, type[Profiler]]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "pytorch": PyTorchProfiler,
}


def profiler_by_name(profiler: str | Profiler | None) -> Profiler:
    """Return the profiler of that name with its defaults; return a profiler as it is.

    Raises:
        ConfigError: for an unknown name.
    """
    if profiler is None:
        return PassThroughProfiler()
    if isinstance(profiler, Profiler):
        return profiler
    if profiler.lower() not in _BY_NAME:
        raise ConfigError(
            "When passing string value for the `profiler` parameter of `Trainer`, it can only be one of "
            f"{', '.join(_BY_NAME)}, got {profiler!r}.{did_you_mean(str(profiler), _BY_NAME)}"
        )
    return _BY_NAME[profiler.lower()]()
