"""DeviceStatsMonitor: log the memory and processor time that a run uses."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection
from pathlib import Path
from time import monotonic, process_time
from typing import Final

from torch import nn

from ..common.process_memory import peak_of_process
from ..strategies.devices.memory import memory_stats
from .callback import Callback
from .run import Run

_OF_DEVICE: Final = (
    "allocated_bytes.all.current",
    "allocated_bytes.all.peak",
    "reserved_bytes.all.current",
    "reserved_bytes.all.peak",
    "inactive_split_bytes.all.current",
    "num_alloc_retries",
    "num_ooms",
)
"""The keys of ``torch.accelerator.memory_stats`` that show how full a GPU is and whether its allocator has retried."""


class DeviceStatsMonitor(Callback):
    """Log the state of the device whenever the trainer logs a step, as ``DeviceStatsMonitor/...``.

    For a GPU: torch's memory statistics in bytes, under torch's names. For the CPU: ``cpu_percent`` of this process
    (100 is one core) since the last reading, its memory as ``rss_bytes`` (where the system reports it, else
    ``peak_rss_bytes``), and the machine's ``load_1min``. The hooks run on every rank, rank 0 logs its own numbers, and
    nothing communicates.

    Args:
        cpu_stats: whether to log the CPU's numbers; None: only if the CPU is the device.
        filter_keys: the numbers to log, such as ``{"cpu_percent"}``; None: all. A name that the device does not have
            causes a warning.

    Example::

        Trainer(max_epochs=1, callbacks=DeviceStatsMonitor(cpu_stats=True)).fit(module, train_loader)
    """

    def __init__(self, cpu_stats: bool | None = None, filter_keys: Collection[str] | None = None) -> None:
        self._cpu_stats = cpu_stats
        self._filter_keys = None if filter_keys is None else frozenset(filter_keys)
        self._read_at = 0.0
        self._busy = 0.0

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Start to measure processor time."""
        self._read_at, self._busy = monotonic(), process_time()
        known = self._read(trainer) if self._filter_keys else {}
        unknown = sorted((self._filter_keys or frozenset()) - known.keys())
        if unknown and trainer.is_global_zero:
            warnings.warn(
                f"DeviceStatsMonitor(filter_keys=...) has {unknown}, which this device does not report; choose from "
                f"{', '.join(known)}.",
                stacklevel=2,
            )

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Log if the trainer logs this step."""
        if trainer.is_log_step and trainer.is_global_zero:
            kept = self._filter_keys
            values = {name: value for name, value in self._read(trainer).items() if kept is None or name in kept}
            trainer.log_metrics({f"DeviceStatsMonitor/{name}": value for name, value in values.items()})

    def _read(self, trainer: Run) -> dict[str, float]:
        device = trainer.strategy.device
        stats: dict[str, float] = {}
        measured = memory_stats(device)
        stats.update({name: float(measured[name]) for name in _OF_DEVICE if name in measured})
        if self._cpu_stats or (self._cpu_stats is None and device.type == "cpu"):
            stats.update(self._read_cpu())
        return stats

    def _read_cpu(self) -> dict[str, float]:
        now, busy = monotonic(), process_time()
        elapsed = now - self._read_at
        stats = {"cpu_percent": 100 * (busy - self._busy) / elapsed if elapsed > 0 else 0.0}
        self._read_at, self._busy = now, busy
        stats.update(_read_process_memory())
        if hasattr(os, "getloadavg"):
            stats["load_1min"] = os.getloadavg()[0]
        return stats


def _read_process_memory() -> dict[str, float]:
    """Return the memory of this process; empty on a system that does not report it."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        resident = int(pages.read_text(encoding="ascii").split()[1])
        return {"rss_bytes": float(resident * os.sysconf("SC_PAGE_SIZE"))}
    peak = peak_of_process()
    return {"peak_rss_bytes": float(peak)} if peak else {}
