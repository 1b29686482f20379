"""TorchProfiler: `PyTorchProfiler` with the arguments of Lightning's, which are those of ``torch.profiler.profile``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..strategies.errors import ConfigError, did_you_mean
from ..trainer.session.detailed_profilers import PyTorchProfiler


class TorchProfiler(PyTorchProfiler):
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

    def _options(self) -> dict[str, Any]:
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
