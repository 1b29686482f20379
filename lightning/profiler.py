"""Profilers with what Lightning's have beyond ours: single durations, profiles, and arguments of torch's profiler."""

from __future__ import annotations

import cProfile
import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import torch

from ..common.errors import ConfigError, did_you_mean
from ..trainer.session.detailed_profilers import AdvancedProfiler as Advanced
from ..trainer.session.detailed_profilers import PyTorchProfiler as OfTorch
from ..trainer.session.profiler import SimpleProfiler as Simple
from .extras.utilities import known_as


@known_as("SimpleProfiler")
class RecordingProfiler(Simple):
    """`SimpleProfiler` that keeps each duration: a number for each call, which a long run pays for in memory."""

    def __init__(self, dirpath: str | Path | None = None, filename: str | None = None, extended: bool = True) -> None:
        super().__init__(dirpath, filename, extended)
        self.recorded_durations: dict[str, list[float]] = {}
        self.current_actions: dict[str, float] = {}

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begin a new table, without the durations of the last."""
        super().setup(stage, local_rank, log_dir)
        self.recorded_durations, self.current_actions = {}, {}

    def profile(self, action_name: str) -> AbstractContextManager[object]:
        """Measure an action inside a ``with`` block."""
        return self._started_and_stopped(action_name)

    def start(self, action_name: str) -> None:
        """Start the timer of the action.

        Raises:
            ConfigError: if it runs already.
        """
        if action_name in self.current_actions:
            raise ConfigError(f"Attempted to start {action_name} which has already started; call stop first.")
        self.current_actions[action_name] = perf_counter()
        super().start(action_name)

    def stop(self, action_name: str) -> None:
        """Stop the timer of the action, and keep its duration."""
        super().stop(action_name)
        duration = perf_counter() - self.current_actions.pop(action_name)
        self.recorded_durations.setdefault(action_name, []).append(duration)


@known_as("AdvancedProfiler")
class FunctionProfiler(Advanced):
    """`AdvancedProfiler`, with its profiles under the name that Lightning's have."""

    @property
    def profiled_actions(self) -> Mapping[str, cProfile.Profile]:
        """The profile of each action."""
        return self._profiles


@known_as("PyTorchProfiler")
class TorchProfiler(OfTorch):
    """Records operators of some steps; without a `schedule`, as the base does by default.

    Args:
        dirpath: as in `Profiler`.
        filename: as in `Profiler`.
        group_by_input_shapes: show operators with other shapes in rows of their own.
        emit_nvtx: must be False: start the program under nsys for that.
        export_to_chrome: write each recording, unless `on_trace_ready` does something else with it.
        row_limit: the operators in the table.
        sort_by_key: what the table is ranked by; by default the time.
        record_module_names: ignored: actions are shown in the trace, not modules.
        table_kwargs: further arguments of torch's ``table``.
        profiler_kwargs: further arguments of ``torch.profiler.profile``, such as `schedule` and `on_trace_ready`.

    Raises:
        ConfigError: for an argument that torch does not know, and for `emit_nvtx`.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: Mapping[str, Any] | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        known = inspect.signature(torch.profiler.profile.__init__).parameters
        for name in profiler_kwargs:
            if name not in known:
                raise ConfigError(
                    f"PyTorchProfiler: {name}={profiler_kwargs[name]!r:.80} is no argument of torch.profiler.profile."
                    f"{did_you_mean(name, known)}"
                )
        if emit_nvtx:
            raise ConfigError(f"PyTorchProfiler: emit_nvtx must be False, got {emit_nvtx}; run the program under nsys.")
        super().__init__(dirpath, filename, row_limit=row_limit, sort_by_key=sort_by_key or "self_cpu_time_total")
        self._table.update(table_kwargs or {})
        self._groups_shapes, self._exports, self._given = group_by_input_shapes, export_to_chrome, profiler_kwargs

    def _options(self) -> dict[str, object]:
        own = {**super()._options(), "record_shapes": self._groups_shapes}
        return {**own, **self._given, "on_trace_ready": self._write}

    def _write(self, profile: torch.profiler.profile) -> None:
        handler = self._given.get("on_trace_ready")
        if handler is None and self._exports:
            super()._write(profile)
            return
        if handler is not None:
            handler(profile)
        self._summary = profile.key_averages(self._groups_shapes).table(**self._table)


PROFILERS: Final = {"simple": RecordingProfiler, "advanced": FunctionProfiler, "pytorch": TorchProfiler}
"""What ``Trainer(profiler="simple")`` makes."""
