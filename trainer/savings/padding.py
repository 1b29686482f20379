"""Savings in padding: tokens of a batch that stand for nothing, and are computed like others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import torch
from torch import Tensor

from .watch import Saving, SavingWatch, Subject, TypicalStep

_MASK: Final = "attention_mask"
"""The name that transformers' tokenizers give to the mask of the tokens that are none."""
_SEEN: Final = 16


class Padding(SavingWatch):
    """Counts the pad tokens of the first micro-batches that say which they are."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._lengths: list[tuple[int, Tensor, Tensor]] = []
        """Of each micro-batch its width, the tokens of each row, and the columns in use; on the device."""

    def see(self, batch: object) -> None:
        mask = batch.get(_MASK) if isinstance(batch, Mapping) else None
        is_mask = isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_floating_point()
        if mask is None or not is_mask or len(self._lengths) == _SEEN:
            return
        used = mask.ne(0)
        self._lengths.append((mask.shape[1], used.sum(1), used.any(0).sum()))

    def savings(self, times: TypicalStep) -> Iterator[Saving]:
        if not self._lengths:
            return
        rows = [tokens.tolist() for _, tokens, _ in self._lengths]
        padded = sum(width * len(tokens) for (width, _, _), tokens in zip(self._lengths, rows, strict=True))
        share = 1 - sum(map(sum, rows)) / padded
        trimmed = sum(int(columns) * len(tokens) for (_, _, columns), tokens in zip(self._lengths, rows, strict=True))
        by_length = _padded_by_length(rows)
        remedy, left = "pad each batch to its longest row only, as padding='longest' does", trimmed
        if by_length < trimmed - (padded - trimmed):  # sorting saves more than cutting off the columns of pads alone
            remedy, left = "batches of rows of similar length, as TokenBatchSampler makes them,", by_length
        if left >= padded:
            return
        saved = (1 - left / padded) * (times.step - times.wait) / times.step
        yield Saving(
            "padding",
            saved,
            f"{share:.0%} of the tokens are padding, and are computed like the others: {remedy} would leave out "
            f"{1 - left / padded:.0%} of all (counted in {len(rows)} micro-batches), and make a step up to {saved:.0%} "
            "shorter.",
        )


def _padded_by_length(rows: list[list[int]]) -> int:
    """Return the tokens of as many batches of as many rows, sorted by their length and padded to the longest."""
    lengths = torch.tensor([length for batch in rows for length in batch]).sort().values.tolist()
    padded, begin = 0, 0
    for batch in rows:
        part = lengths[begin : begin + len(batch)]
        padded += len(part) * max(part, default=0)
        begin += len(batch)
    return padded
