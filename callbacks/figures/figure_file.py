"""Figures as files: drawn with matplotlib and written as PNG."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.errors import MissingDependencyError, RunError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def need_matplotlib() -> None:
    """Check that matplotlib is installed.

    Raises:
        MissingDependencyError: if it is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(
            f"Drawing needs matplotlib, which {sys.executable} cannot import; run: pip install matplotlib."
        )


@contextmanager
def figure_file(path: Path, width: float, height: float, *, argument: str) -> Iterator[Figure]:
    """Yield an empty figure of this size, and write it to a PNG file at the end.

    Args:
        path: the file.
        width: in inches, of 120 pixels each.
        height: in inches.
        argument: the argument with which the user named the file.

    Raises:
        MissingDependencyError: without matplotlib.
        RunError: if the file cannot be written.
    """
    need_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    yield figure
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise RunError(
            f"{str(path)!r} cannot be written: {error.strerror}; give another file to {argument}."
        ) from error
