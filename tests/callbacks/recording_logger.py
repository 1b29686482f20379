"""A logger that keeps what it is told in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


class RecordingLogger:
    """Keeps every call of `log_metrics`."""

    name = "recording"
    version = 7

    def __init__(self, log_dir: str) -> None:
        self.log_dir = log_dir
        self.records: list[tuple[int, dict[str, float]]] = []

    def open(self) -> None:
        pass

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.records.append((step, dict(metrics)))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        pass

    def log_text(self, tag: str, text: str) -> None:
        pass

    def log_graph(self, module: nn.Module, example_input: Any) -> None:
        pass

    def resume_at(self, step: int) -> None:
        pass

    def save(self) -> None:
        pass

    def finalize(self, metrics: Mapping[str, float], status: str) -> None:
        pass

    def series(self, name: str) -> list[tuple[int, float]]:
        """All values of one name, with their steps."""
        return [(step, metrics[name]) for step, metrics in self.records if name in metrics]

    def names(self, prefix: str) -> set[str]:
        """All names that begin so."""
        return {name for _, metrics in self.records for name in metrics if name.startswith(prefix)}
