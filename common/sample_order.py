"""Reading and Source: the samples of a micro-batch, and the order of the loader that they come from."""

from __future__ import annotations

from typing import Any, NamedTuple


class Reading(NamedTuple):
    """The samples that one loader contributed to a micro-batch."""

    loader: int
    lap: int
    """How often the loader has restarted in this epoch of the run."""
    place: int
    """The place in the loader's order at which it begins."""
    indices: Any
    """The indices from the loader's sampler; None if it has none."""
    size: int = 0
    """The number of samples, if there are no indices."""


class Source(NamedTuple):
    """The order of one loader in an epoch, as far as it is known."""

    num_indices: int = -1
    """The size of the data set; -1 if it has no indices."""
    end: int = -1
    """The place after the last one that is read; -1 if it is unknown, or a limit cuts the epoch."""
    comes_once: int = 0
    """1 if each index comes once; 0 if a user's sampler decides."""
    in_batches: int = 1
    """1 if a place is a ready-made batch, 0 if it is a sample."""
    num_streams: int = 1
    """1 if all ranks share one order; the number of ranks if each has its own."""
