"""CombinedLoader: several loaders read as one, side by side or one after the other."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from ...common.errors import ConfigError, DataError, did_you_mean
from .loader_kinds import begin_iteration

Mode: TypeAlias = Literal["min_size", "max_size_cycle", "max_size", "sequential"]
Item: TypeAlias = tuple[Any, int, int]
"""(batch, batch_idx, dataloader_idx)"""
Limited: TypeAlias = tuple[Any, int | float]
"""(loader, the largest number of its batches to take)"""

_OVER: Final = object()


class CombinedLoader:
    """Reads the loaders in a nested dict, list or tuple as one; its items are (batch, batch_idx, dataloader_idx).

    The modes are Lightning's:

    - ``min_size``: a batch of each, in the structure of `iterables`, until the shortest is exhausted.
    - ``max_size``: until the longest is exhausted, with None for those that are exhausted before.
    - ``max_size_cycle``: until the longest is exhausted; the others restart.
    - ``sequential``: one loader after the other; ``batch_idx`` begins at 0 for each, ``dataloader_idx`` says which.

    Args:
        iterables: the loaders, or any iterables of batches, in nested dicts, lists and tuples.
        mode: one of these.

    Raises:
        ConfigError: for an unknown mode.

    Example::

        both = CombinedLoader({"labelled": train_loader, "unlabelled": val_loader}, mode="max_size_cycle")
        for batch, batch_idx, dataloader_idx in both:
            features, targets = batch["labelled"]
    """

    def __init__(self, iterables: object, mode: Mode = "min_size") -> None:
        if mode not in _LENGTHS:
            raise ConfigError(f"Unsupported mode {mode!r} of CombinedLoader.{did_you_mean(str(mode), _LENGTHS)}")
        self.mode: Mode = mode
        self._iterables = iterables
        self._limits: list[int | float] | None = None

    @property
    def iterables(self) -> Any:
        """The loaders in their nested structure."""
        return self._iterables

    @property
    def flattened(self) -> list[Any]:
        """The loaders as a flat list; setting it replaces them in their structure."""
        found: list[object] = []
        _map_leaves(found.append, self._iterables)
        return found

    @flattened.setter
    def flattened(self, iterables: Iterable[object]) -> None:
        new = list(iterables)
        if len(new) != len(self.flattened):
            raise ConfigError(
                f"Mismatch in flattened length ({len(new)}) and existing length ({len(self.flattened)}): give one "
                "loader for each."
            )
        self._iterables = _replace_leaves(self._iterables, new)

    @property
    def limits(self) -> list[int | float] | None:
        """The largest number of batches to take from each loader; setting one number sets it for all."""
        return self._limits

    @limits.setter
    def limits(self, limits: float | list[int | float] | None) -> None:
        count = len(self.flattened)
        if isinstance(limits, int | float):
            limits = [limits] * count
        if limits is not None and len(limits) != count:
            raise ConfigError(f"limits={limits!r} are {len(limits)} numbers for {count} loaders; give one for each.")
        self._limits = limits

    def __len__(self) -> int:
        lengths = [min(_count_batches(loader), limit) for loader, limit in self._limited()]
        length = _LENGTHS[self.mode](lengths) if lengths else 0
        if length == math.inf:
            raise TypeError(
                f"CombinedLoader(mode={self.mode!r}) has a loader without a length, so it has no length; set limits."
            )
        return int(length)

    def __iter__(self) -> Iterator[Item]:
        if self.mode == "sequential":
            return _one_after_another(self._limited())
        return self._side_by_side(_READERS[self.mode](self._limited()))

    def _side_by_side(self, rows: Iterator[Sequence[object]]) -> Iterator[Item]:
        for batch_idx, row in enumerate(rows):
            yield _replace_leaves(self._iterables, row), batch_idx, 0

    def _limited(self) -> list[Limited]:
        loaders = self.flattened
        return list(zip(loaders, self._limits or [math.inf] * len(loaders), strict=True))


def _one_after_another(loaders: Sequence[Limited]) -> Iterator[Item]:
    for dataloader_idx, loader in enumerate(loaders):
        for batch_idx, batch in enumerate(_limit_batches(loader)):
            yield batch, batch_idx, dataloader_idx


def _until_the_shortest(loaders: Sequence[Limited]) -> Iterator[Sequence[object]]:
    return zip(*map(_limit_batches, loaders), strict=False)


def _until_the_longest(loaders: Sequence[Limited]) -> Iterator[Sequence[object]]:
    return itertools.zip_longest(*map(_limit_batches, loaders))


def _beginning_again(loaders: Sequence[Limited]) -> Iterator[Sequence[object]]:
    iterators = [begin_iteration(loader) for loader, _ in loaders]
    is_over = [getattr(loader, "rounds", 0) > 0 for loader, _ in loaders]  # in a resumed run, it may have restarted
    for taken in itertools.count():
        row = [next(iterator, _OVER) for iterator in iterators]
        for position, (_, limit) in enumerate(loaders):
            is_over[position] |= row[position] is _OVER or taken >= limit
        if all(is_over):
            return
        for position in (position for position, batch in enumerate(row) if batch is _OVER):
            iterators[position] = begin_iteration(loaders[position][0])
            row[position] = next(iterators[position], _OVER)
            if row[position] is _OVER:
                raise DataError(f"Loader {position} of CombinedLoader(mode='max_size_cycle') is empty; give it data.")
        yield row


def _limit_batches(loader: Limited) -> Iterator[object]:
    iterable, limit = loader
    return itertools.islice(begin_iteration(iterable), None if limit == math.inf else int(limit))


def _count_batches(iterable: Any) -> int | float:
    try:
        return len(iterable)
    except (TypeError, NotImplementedError):  # what torch's iterable datasets raise
        return math.inf


def _replace_leaves(tree: object, leaves: Sequence[object]) -> object:
    remaining = iter(leaves)
    return _map_leaves(lambda _: next(remaining), tree)


def _map_leaves(function: Callable[[object], object], tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _map_leaves(function, value) for key, value in tree.items()}
    # a list of numbers or strings is itself an iterable of batches
    if isinstance(tree, list | tuple) and not (tree and all(isinstance(value, int | float | str) for value in tree)):
        parts = [_map_leaves(function, value) for value in tree]
        if isinstance(tree, list):
            return parts
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return function(tree)


_LENGTHS: Final[dict[str, Callable[[list[int | float]], int | float]]] = {
    "min_size": min,
    "max_size_cycle": max,
    "max_size": max,
    "sequential": sum,
}
_READERS: Final[dict[str, Callable[[Sequence[Limited]], Iterator[Sequence[object]]]]] = {
    "min_size": _until_the_shortest,
    "max_size_cycle": _beginning_again,
    "max_size": _until_the_longest,
}


def combined_of(source: object) -> CombinedLoader | None:
    """Return several loaders as a new CombinedLoader; None for a single loader."""
    if isinstance(source, CombinedLoader):
        return copy.copy(source)
    if isinstance(source, Mapping | list | tuple):
        return CombinedLoader(source, "max_size_cycle")
    return None
