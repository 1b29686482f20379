"""A logger that keeps everything it is given in memory."""

from __future__ import annotations

from collections.abc import Mapping

from echelon import Logger


class RecordingLogger(Logger):
    """Keeps every call of `log_metrics`, and ignores everything else."""

    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir
        self.records: list[tuple[int, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "recording"

    @property
    def version(self) -> int:
        return 7

    @property
    def log_dir(self) -> str:
        return self._log_dir

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.records.append((step, dict(metrics)))

    def series(self, name: str) -> list[tuple[int, float]]:
        """Return all values of a metric, with their steps."""
        return [(step, metrics[name]) for step, metrics in self.records if name in metrics]

    def names(self, prefix: str) -> set[str]:
        """Return all names that start with this prefix."""
        return {name for _, metrics in self.records for name in metrics if name.startswith(prefix)}
