"""Profilers: the time of a run by action, as a table or as a trace of every operator."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import ClassVar, Final, ParamSpec, TypeVar

import torch

from ...strategies.errors import ConfigError, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

_NOTHING: Final = nullcontext()


class Profiler(ABC):
    """What measures a run. A profiler can serve several runs, one after the other.

    The trainer records ``fetch``, ``training_step``, ``backward``, ``optimizer_step``, ``validation_step`` and
    ``checkpoint``; a module adds its own with ``with self.trainer.profiler.record("decode"): ...``.
    """

    is_active: ClassVar[bool] = True
    """Whether it measures anything."""

    def start(self, log_dir: str, rank: int = 0) -> None:
        """Begin to measure; files go to `log_dir`, each rank's under its own name."""

    @abstractmethod
    def record(self, action: str) -> AbstractContextManager[object]:
        """Return a context whose time counts as `action`; called several times a step."""

    def measured(self, action: str, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function each of whose calls is recorded."""

        def recorded(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.record(action):
                return function(*args, **kwargs)

        return recorded

    def step(self) -> None:
        """Note that an optimizer step has ended."""

    def stop(self) -> str:
        """End the measurement and return a summary to print, which may be empty."""
        return ""


class NullProfiler(Profiler):
    """Measures nothing, in 0.2 us an action."""

    is_active: ClassVar[bool] = False

    def record(self, action: str) -> AbstractContextManager[object]:
        """Return one and the same empty context."""
        return _NOTHING

    def measured(self, action: str, function: Callable[P, R]) -> Callable[P, R]:
        """Return the function itself."""
        return function


class SimpleProfiler(Profiler):
    """Measures how often and how long each action ran: host time, so work queued on a GPU counts where it is awaited.

    The table is returned for printing and appended to ``profile-rank0.txt`` in the run's folder.
    """

    def __init__(self) -> None:
        self._timers: dict[str, _Timer] = {}
        self._started = 0.0
        self._file = Path()

    def start(self, log_dir: str, rank: int = 0) -> None:
        """Begin a new table."""
        self._file = Path(log_dir) / f"profile-rank{rank}.txt"
        self._timers = {}
        self._started = perf_counter()

    def record(self, action: str) -> AbstractContextManager[object]:
        """Return the timer of the action."""
        timer = self._timers.get(action)
        if timer is None:
            timer = self._timers[action] = _Timer()
        return timer

    def stop(self) -> str:
        """Write the table, the costliest action first, and return it; actions inside others count in both."""
        elapsed = perf_counter() - self._started
        rows = [f"{'action':<28}{'calls':>10}{'mean (ms)':>14}{'total (s)':>14}{'%':>8}"]
        rows.append("-" * len(rows[0]))
        for action, timer in sorted(self._timers.items(), key=lambda item: -item[1].total):
            mean = 1000 * timer.total / max(timer.calls, 1)
            share = 100 * timer.total / elapsed
            rows.append(f"{action:<28}{timer.calls:>10}{mean:>14.4f}{timer.total:>14.3f}{share:>8.1f}")
        rows.append(f"{'the whole run':<28}{'':>24}{elapsed:>14.3f}{100.0:>8.1f}")
        table = "\n".join(rows)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(table + "\n\n")
        return table


class _Timer:
    """The calls of one action; a context that can be entered again inside itself."""

    __slots__ = ("_starts", "calls", "total")

    def __init__(self) -> None:
        self.calls = 0
        self.total = 0.0
        self._starts: list[float] = []

    def __enter__(self) -> None:
        self._starts.append(perf_counter())

    def __exit__(self, *_: object) -> None:
        self.total += perf_counter() - self._starts.pop()
        self.calls += 1


class PyTorchProfiler(Profiler):
    """Records every operator of a few steps with ``torch.profiler``, on the host and on the accelerator.

    Skips `wait` steps, warms up for `warmup`, records `active`, and does so `repeat` times (0: to the end of the run).
    Each recording becomes ``rank<rank>.<step>.pt.trace.json`` in the run's folder, which TensorBoard and
    https://ui.perfetto.dev open.

    Raises:
        ConfigError: for a schedule that records nothing.
    """

    def __init__(
        self,
        wait: int = 1,
        warmup: int = 1,
        active: int = 3,
        repeat: int = 1,
        *,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        smallest = {"wait": (wait, 0), "warmup": (warmup, 0), "active": (active, 1), "repeat": (repeat, 0)}
        for name, (value, least) in smallest.items():
            if value < least:
                raise ConfigError(f"PyTorchProfiler: {name}={value} is not possible; give {least} or more.")
        self._schedule = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        self._record_shapes = record_shapes
        self._profile_memory = profile_memory
        self._with_stack = with_stack
        self._profile: torch.profiler.profile | None = None
        self._log_dir = Path()
        self._rank = 0
        self._summary = ""

    def start(self, log_dir: str, rank: int = 0) -> None:
        """Begin to count steps; the recording itself begins when the schedule says so."""
        self._log_dir = Path(log_dir)
        self._rank = rank
        self._summary = ""
        self._profile = torch.profiler.profile(
            schedule=torch.profiler.schedule(**self._schedule),
            on_trace_ready=self._write,
            record_shapes=self._record_shapes,
            profile_memory=self._profile_memory,
            with_stack=self._with_stack,
        )
        self._profile.start()

    def record(self, action: str) -> AbstractContextManager[object]:
        """Return a context under whose name the operators inside it stand in the trace."""
        return torch.profiler.record_function(action)

    def step(self) -> None:
        """Move on in the schedule; at the end of a recording, write it."""
        if self._profile is None:
            return
        with warnings.catch_warnings():
            # each recording is written when it ends, so that torch may forget it when the next begins
            warnings.filterwarnings("ignore", message=".*Profiler clears events")
            self._profile.step()

    def stop(self) -> str:
        """End a recording that still runs, and return the costliest operators of the last one."""
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
        path = self._log_dir / f"rank{self._rank}.{profile.step_num}.pt.trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))
        table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=20)
        self._summary = f"{table}\nTrace: {path} (open it in https://ui.perfetto.dev)"


_BY_NAME: Final[dict[str, type[Profiler]]] = {"simple": SimpleProfiler, "pytorch": PyTorchProfiler}


def profiler_by_name(profiler: str | Profiler | None) -> Profiler:
    """Return the profiler of that name with its defaults; a profiler is returned as it is.

    Raises:
        ConfigError: for a name that no profiler has.
    """
    if profiler is None:
        return NullProfiler()
    if isinstance(profiler, Profiler):
        return profiler
    if profiler not in _BY_NAME:
        raise ConfigError(f"profiler={profiler!r} is not a known profiler.{did_you_mean(str(profiler), _BY_NAME)}")
    return _BY_NAME[profiler]()
