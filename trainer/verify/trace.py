"""Trace: the outputs of all submodules in a step, in call order, compared sample by sample with one process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from ...strategies import Strategy
from ...strategies.distributed.nested import iterate_tensors
from ...strategies.state.dtensor import is_dtensor
from . import differences
from .differences import Deviation

BATCH: Final = "the batch"
"""The name for the inputs of a step, which come before all modules."""


@dataclass
class Traced:
    """The trace of one step, as it is sent to the caller."""

    called: list[str] = field(default_factory=list)
    """Submodules in the order in which their first calls ended; nested ones first."""
    ids: list[object] = field(default_factory=list)
    """The indices of the samples, in the order of the rows."""
    different: dict[str, Deviation] = field(default_factory=dict)
    """The outputs that differ from those of one process, by module."""
    compared: int = 0
    """The number of outputs that could be compared."""
    random: str | None = None
    """The first submodule that drew random numbers; "" for the step itself."""
    lowest: str | None = None
    """The first submodule whose output has less than 64 bits of precision."""


class Trace:
    """Records or compares the outputs of submodules in the forward passes of one optimizer step.

    A row is a sample: outputs are compared if one of their dimensions is the number of samples of the micro-batch, no
    matter in which rank's micro-batch a sample comes. If sequences are cut over ranks, so are the rows of one process.

    Args:
        module: whose submodules are called.
        file: where the outputs of one process are, or will be, written.
        ids: the samples of that process, row by row; None in that process itself.
    """

    def __init__(self, module: nn.Module, file: Path, ids: Sequence[object] | None) -> None:
        self.traced = Traced()
        self._names = {id(part): name for name, part in module.named_modules()}
        self._module, self._file = module, file
        self._expected = None if ids is None else differences.read_reference(file)
        self._rows = {} if ids is None else {one: row for row, one in enumerate(ids)}
        self._kept: dict[str, list[Tensor]] = {}
        self._calls: Counter[str] = Counter()
        self._ids: Sequence[object] = ()
        self._positions: Tensor | None = None
        self._random: list[Tensor] = []

    @contextmanager
    def micro_batch(self, batch: object, ids: Sequence[object], strategy: Strategy) -> Iterator[None]:
        """Follow the forward pass of a micro-batch whose samples have these indices."""
        self._ids, self._calls = ids, Counter()
        self.traced.ids += ids
        sharers = strategy.ranks.loss.world_size // max(strategy.data_size, 1)
        self._sharers, self._strategy = sharers, strategy
        with ExitStack() as hooks:
            for part in self._module.modules():
                if part is self._module:
                    continue
                for handle in (
                    part.register_forward_pre_hook(self._begin, prepend=True),
                    part.register_forward_hook(self._end),
                ):
                    hooks.callback(handle.remove)
            self._note(BATCH, batch)
            state = torch.get_rng_state()
            yield
            if self.traced.random is None and not torch.equal(state, torch.get_rng_state()):
                self.traced.random = ""

    def write(self) -> None:
        """Write the outputs of one process."""
        if self._expected is None:
            differences.write_reference(self._file, {name: torch.cat(parts) for name, parts in self._kept.items()})

    def _begin(self, part: nn.Module, args: object) -> None:
        self._random.append(torch.get_rng_state())

    def _end(self, part: nn.Module, args: object, output: object) -> None:
        name = self._names.get(id(part), type(part).__name__)
        before = self._random.pop()
        if self.traced.random is None and not torch.equal(before, torch.get_rng_state()):
            self.traced.random = name
        if name not in self.traced.called:
            self.traced.called.append(name)
        self._note(name, output)

    def _note(self, name: str, values: object) -> None:
        """Keep, or compare, the rows of all tensors of an output."""
        number = self._calls[name]
        self._calls[name] += 1
        for leaf, tensor in enumerate(iterate_tensors(values)):
            if is_dtensor(tensor):
                continue
            if name != BATCH and tensor.is_floating_point() and tensor.dtype != torch.float64:
                self.traced.lowest = self.traced.lowest or name
            rows = _rows_of_samples(tensor.detach(), len(self._ids))
            if rows is not None:
                self._take(name, f"{name}|{number}|{leaf}", rows)

    def _take(self, name: str, key: str, rows: Tensor) -> None:
        rows = rows.to("cpu", torch.float64, copy=True)
        if self._expected is None:
            self._kept.setdefault(key, []).append(rows)
            return
        expected = self._expected.get(key)
        if expected is None or not set(self._ids) <= self._rows.keys() or len(expected) != len(self._rows):
            return
        expected = expected[[self._rows[one] for one in self._ids]]
        if expected.shape != rows.shape:
            expected = self._own_part(expected, rows)
        if expected is None or expected.shape != rows.shape:
            return
        self.traced.compared += 1
        found = differences.measure_deviation(rows, expected, 0.0)
        known = self.traced.different.get(name)
        if found.size and (known is None or known.size < found.size):
            self.traced.different[name] = found

    def _own_part(self, expected: Tensor, rows: Tensor) -> Tensor | None:
        """Return this rank's part of whole sequences."""
        if self._sharers < 2 or rows.dim() < 2 or expected.dim() < 2:
            return None
        if abs(expected.shape[1] - rows.shape[1] * self._sharers) >= self._sharers:  # parts differ by a token at most
            return None
        try:
            places = self._strategy.positions(rows.shape[1]).cpu()
        except ModuleError:  # no part of a sequence
            return None
        own: Tensor | None = expected[:, places] if int(places.max()) < expected.shape[1] else None
        return own


def _rows_of_samples(tensor: Tensor, size: int) -> Tensor | None:
    """Return a tensor with a row for each of `size` samples; None if neither of its first two dimensions holds them."""
    if tensor.dim() and tensor.shape[0] == size:
        return tensor
    if tensor.dim() > 1 and tensor.shape[1] == size:
        return tensor.transpose(0, 1)
    if tensor.dim() and size > 1 and tensor.shape[0] and tensor.shape[0] % size == 0:
        return tensor.reshape(size, -1, *tensor.shape[1:])
    return None


def order_of(called: Sequence[str]) -> Mapping[str, int]:
    """Return the position of each module in call order; the batch comes first."""
    return {BATCH: -1, **{name: place for place, name in enumerate(called)}}
