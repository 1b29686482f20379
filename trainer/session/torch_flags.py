"""Flags of torch that are set for the length of a run: determinism, cuDNN's benchmark, anomaly detection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .settings import Settings


@contextmanager
def set_torch_flags(settings: Settings) -> Iterator[None]:
    """Set torch's flags from the settings, and restore them afterwards."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmarked = torch.backends.cudnn.benchmark
    if settings.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=settings.deterministic == "warn")
    if settings.benchmark is not None or settings.deterministic:
        torch.backends.cudnn.benchmark = bool(settings.benchmark)
    try:
        with torch.autograd.set_detect_anomaly(settings.detect_anomaly or torch.is_anomaly_enabled()):
            yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic, warn_only=only_warned)
        torch.backends.cudnn.benchmark = benchmarked
