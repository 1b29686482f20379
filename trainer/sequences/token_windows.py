"""Windows of tokens: steps whose tokens are counted over all ranks, and steps that reach a number of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ...strategies import Strategy
from ..data.micro_batch import Window
from ..data.sample_checks import gather_numbers


def count_window_tokens(
    windows: Iterable[Window], tokens_of: Callable[[object], int], strategy: Strategy
) -> Iterator[Window]:
    """Yield windows with the tokens of all ranks. Collective with several data ranks: every rank calls it."""
    for window in windows:
        tokens = sum(tokens_of(micro_batch.batch) for micro_batch in window)
        if strategy.data_size > 1:
            tokens = sum(int(row[0]) for row in gather_numbers(strategy, [float(tokens)]))
        window.tokens = tokens
        yield window


def join_windows(windows: Iterable[Window], budget: int) -> Iterator[Window]:
    """Yield windows of as many micro-batches as reach `budget` tokens, the same number on all ranks.

    The last one of an epoch may have fewer. Where one ends depends on what was read since the one before alone, so that
    a resumed run ends them at the same places.
    """
    parts: list[Window] = []
    for window in windows:
        parts.append(window)
        if sum(part.tokens for part in parts) >= budget:
            yield Window.of_parts(parts)
            parts = []
    if parts:
        yield Window.of_parts(parts)
