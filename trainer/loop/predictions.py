"""The predictions of all ranks, in the order of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def in_dataset_order(gathered: Sequence[Sequence[Sequence[tuple[int, Any]]]]) -> list[list[Any]]:
    """Return for each loader the predictions of all ranks in the order of its batches.

    Args:
        gathered: for each rank and each loader the pairs of batch index and prediction. Ranks that saw the same batch
            (they share a model) have the same prediction, of which one is kept.
    """
    merged: list[list[Any]] = []
    for parts in zip(*gathered, strict=True):
        by_index = {batch_idx: prediction for part in parts for batch_idx, prediction in part}
        merged.append([by_index[batch_idx] for batch_idx in sorted(by_index)])
    return merged
