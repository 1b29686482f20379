"""PartLengths: the lengths of whole sequences, of which a tensor's length shows only that of a part."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ...common.errors import ModuleError
from .sequence import SequenceLayout


class PartLengths:
    """Tells how long the sequence is that a part of some length belongs to.

    Sequences of nearly the same length have parts of the same length on some rank. Where a batch has such sequences,
    the ranks ask each other.

    Args:
        cut: how sequences are cut.
        ask: returns the sum of a number over the ranks of the sequences. Collective.
    """

    def __init__(self, cut: SequenceLayout, ask: Callable[[int], int]) -> None:
        self._cut, self._ask = cut, ask
        self._current: frozenset[int] = frozenset()

    def begin(self, lengths: Collection[int]) -> None:
        """Begin a step on a batch with sequences of these lengths."""
        self._current = frozenset(lengths)

    def known(self, part: int) -> bool:
        """Return whether a part of a sequence has this length."""
        return any(self._cut.part_length(length) == part for length in self._current)

    def whole(self, part: int) -> int:
        """Return the length of the sequence. Collective where the batch has sequences of nearly the same length.

        Raises:
            ModuleError: if no sequence of the batch has such a part.
        """
        found = [length for length in self._current if self._cut.part_length(length) == part]
        if not found:
            raise ModuleError(self.refusal(f"{part} tokens"))
        # if one rank may take it for another, all ask
        return self._ask(part) if any(self._look_alike(found[0], length) for length in self._current) else found[0]

    def joined(self, tokens: int, whole: int) -> tuple[int, int]:
        """Return how many sequences are joined, and the length of each.

        Args:
            tokens: of this rank.
            whole: the tokens of all ranks.

        Raises:
            ModuleError: if these are not the parts of sequences of the batch, or of two kinds of them.
        """
        found = [
            (whole // length, length)
            for length in self._current
            if not whole % length and whole // length * self._cut.part_length(length) == tokens
        ]
        if len(found) == 1:
            return found[0]
        lengths = " or ".join(map(str, sorted(self._current)))
        raise ModuleError(
            f"varlen_attn under context parallelism joins this rank's parts of sequences of {lengths} tokens, and its "
            f"cu_seqlens those of the whole sequences, got {tokens} tokens and cu_seqlens that end at {whole}; pass "
            "the cu_seqlens of the whole batch, as PackedDataset.collate makes them, or use cp=1."
        )

    def _look_alike(self, one: int, other: int) -> bool:
        """Return whether the parts of two sequences have the same length on any rank."""
        parts = ((self._cut.part_length(length, rank) for length in (one, other)) for rank in range(self._cut.size))
        return one != other and any(a == b for a, b in parts)

    def refusal(self, found: str) -> str:
        """Return the text of an error about something that is no part of the batch's sequences."""
        lengths = " or ".join(map(str, sorted({self._cut.part_length(length) for length in self._current})))
        return (
            "Attention under context parallelism must be over this rank's part of the batch's sequences, "
            f"{lengths or 0} tokens, got {found}. A class token, patches or a shorter sequence that the module "
            "creates itself cannot be cut: create it in the dataset, or use cp=1."
        )
