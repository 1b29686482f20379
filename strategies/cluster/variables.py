"""Functions that read numbers from a launcher's variables."""

from __future__ import annotations

from collections.abc import Mapping

from ...common.errors import ConfigError


def has_all(environ: Mapping[str, str], *names: str) -> bool:
    """Return whether all of these variables are set and not empty."""
    return all(environ.get(name) for name in names)


def read_number(environ: Mapping[str, str], name: str) -> int:
    """Return the number in a variable.

    Raises:
        ConfigError: if it is not set, or not a number.
    """
    text = environ.get(name, "")
    if not text:
        raise ConfigError(
            f"{name} is not set, but other variables of the same launcher are; set it, or unset the others."
        )
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"{name}={text!r} is not a number; set it to a number of 0 or more, or unset it.")
    return int(text)


def first_number(environ: Mapping[str, str], *names: str) -> int | None:
    """Return the number in the first of these variables that is set; None if none is."""
    return next((read_number(environ, name) for name in names if environ.get(name)), None)


def job_port(job: int) -> int:
    """Return a port that all processes of a job derive from its id, below the kernel's range of ephemeral ports."""
    return 15000 + job % 10000
