"""Variables of a Ray Train worker: torch's, next to Ray's own."""

from __future__ import annotations

from collections.abc import Mapping

from .environment import Environment
from .torchrun import has_torch_variables, read_torch_variables
from .variables import has_all


def read_ray(environ: Mapping[str, str]) -> Environment | None:
    """Return the environment of a Ray Train worker; None for other processes, such as torchrun within a Ray task."""
    is_ray = has_all(environ, "RAY_JOB_ID") or has_all(environ, "RAY_RAYLET_PID")
    if not is_ray or "TORCHELASTIC_RUN_ID" in environ or not has_torch_variables(environ):
        return None
    return read_torch_variables(environ, "Ray Train")
