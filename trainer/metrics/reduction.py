"""Reduction of metrics over all ranks: their names are agreed on once, and their numbers are sent as one vector."""

from __future__ import annotations

import functools
import math
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from ...strategies import Strategy
from .accumulator import Accumulator, to_numbers
from .gathering import gather_once
from .sample_guard import WIDTH, SampleGuard, Tally


@runtime_checkable
class ComputedMetric(Protocol):
    """A metric that accumulates by itself, like torchmetrics' ``Metric``."""

    def compute(self) -> Tensor:
        """Return the value of everything seen since `reset`, on all ranks. Collective: every rank calls it."""

    def reset(self) -> None:
        """Forget everything."""


def computed_value(name: str, metric: ComputedMetric) -> Tensor | None:
    """Return the value of a metric that accumulates by itself, None if it has none. Collective: every rank calls it.

    Raises:
        ModuleError: if the value is not a single number.
    """
    value: object = metric.compute()
    if value is None:
        return None
    if not isinstance(value, Tensor) or value.numel() != 1:
        shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ModuleError(
            f"self.log({name!r}, metric) must get a metric of one number, but {type(metric).__name__}.compute() "
            f"returned {shown}; log its numbers under names of their own, with self.log_dict for example."
        )
    return value.detach().double().reshape(())


@dataclass(frozen=True, slots=True)
class Line:
    """One metric as every rank knows it, including ranks that have not logged it."""

    key: str
    """The key under which it is kept; several loaders may log the same name."""
    name: str
    reported: str
    """The reported name, with ``_step`` or ``_epoch`` if both are reported."""
    reduce_fx: Literal["mean", "sum", "min", "max", "function"]
    prog_bar: bool
    logger: bool
    path: str | None = field(default=None, compare=False)
    """The path, in the module, of the object that computes the value; empty: it is elsewhere; None: it is a number."""
    is_double: bool = field(default=False, compare=False)
    """Whether the value is reported in float64."""
    dataloader_idx: int | None = field(default=None, compare=False)
    """The index of the loader in whose batches it is logged, if there are several."""


class Share(NamedTuple):
    """This rank's values of a metric."""

    line: Line
    accumulator: Accumulator
    computed: ComputedMetric | None = None


class Partial(NamedTuple):
    """The values of a metric on all ranks: a total (for a function, all values) and a weight."""

    total: Tensor
    weight: float
    ranks: Sequence[int]
    """The ranks whose values count: among ranks that share a loss, the first that has a value."""


class Reduction:
    """The reads of one kind (the steps of training, say, or the epochs of validation) on several ranks.

    All numbers of a read form one vector per rank, over the list of metrics that all ranks know. The vectors are
    gathered, and reduced in rank order on each rank, so every rank has the same bits. A rank with a new metric says so
    in its vector; then the ranks agree on the list again, and the vectors are gathered again. So ranks may log
    different metrics, or in a different order, and still call the same collectives. The tallies of the guard, if there
    is one, go with them.
    """

    def __init__(self, strategy: Strategy, module: nn.Module | None, guard: SampleGuard | None = None) -> None:
        self._strategy, self._module, self._guard = strategy, module, guard
        self._metrics: dict[str, ComputedMetric] = {}
        self._tallies: dict[str, list[Tally]] = {}
        """What each rank counted for the guard, as of the last `partials`."""
        self.lines: dict[str, Line] = {}
        """The metrics that all ranks know, in the same order on each."""

    def values(self, mine: Mapping[str, Share]) -> list[tuple[Line, Tensor]]:
        """Return the value of every metric that any rank has logged in an epoch. Collective: every rank calls it.

        Raises:
            ModuleError: as in `partials`.
        """
        partials = self.partials(mine)
        for key in partials.keys() & self._tallies.keys():
            assert self._guard is not None
            self._guard.compare(self.lines[key].name, self._tallies[key])
        results = self._call_functions(mine, partials)
        values = []
        for key, partial in partials.items():
            line = self.lines[key]
            if line.path is not None:
                computed = self._compute(line)
                if computed is None:
                    continue
                value = computed
            elif line.reduce_fx == "function":
                value = results[key]
            elif line.reduce_fx == "mean":
                value = partial.total / partial.weight
            else:
                value = partial.total
            values.append((line, value))
        return values

    def partials(self, mine: Mapping[str, Share]) -> dict[str, Partial]:
        """Return totals and weights over all ranks. Collective: every rank calls it.

        Raises:
            ModuleError: on every rank, if one logs a metric differently from the others.
        """
        self._metrics.update({key: share.computed for key, share in mine.items() if share.computed is not None})
        rows = self._gather(mine)
        if any(row[0] for row in rows):
            self._agree(mine)
            rows = self._gather(mine)
        told = self._told()
        self._tallies = {
            key: [Tally(*row[end : end + WIDTH or None]) for row in rows]
            for key, end in zip(told, range(-WIDTH * len(told), 0, WIDTH), strict=True)
        }
        partials = {}
        for position, (key, line) in enumerate(self.lines.items()):
            column = 2 + 2 * position
            counted: dict[float, int] = {}
            for rank, row in enumerate(rows):
                if not math.isnan(row[column + 1]):
                    counted.setdefault(row[1], rank)
            if counted:
                ranks = tuple(counted.values())
                total = _merge_totals(line, [rows[rank][column] for rank in ranks])
                weight = functools.reduce(operator.add, (rows[rank][column + 1] for rank in ranks))
                partials[key] = Partial(total, weight, ranks)
        return self._with_values(mine, partials)

    def reset(self) -> None:
        """Reset the metric objects that were computed here, whichever rank logged them."""
        for metric in self._metrics.values():
            metric.reset()

    # --- the steps of a read -----------------------------------------------------------------------------------------

    def _gather(self, mine: Mapping[str, Share]) -> list[list[float]]:
        """Return every rank's vector: whether it has a new metric, its loss, total and weight of each line, tallies.

        The weight is NaN if a rank has no value. Ranks that share one replica have the same loss, which counts once.
        """
        is_new = any(self.lines.get(key) != share.line for key, share in mine.items())
        known = {key: share.accumulator.partial() for key, share in mine.items() if key in self.lines}
        totals = to_numbers({key: total for key, (total, _) in known.items() if total.ndim == 0})
        vector = [float(is_new), float(self._strategy.ranks.loss.rank)]
        for key in self.lines:
            vector += (totals.get(key, 0.0), known[key][1]) if key in known else (0.0, math.nan)
        for key in self._told():
            assert self._guard is not None
            vector += self._guard.tally(key, self._metrics.get(key))
        # on the CPU, whatever the device, since the numbers are read there
        rows: list[list[float]] = self._strategy.ranks.all.all_gather(
            torch.tensor(vector, dtype=torch.float64)
        ).tolist()
        return rows

    def _told(self) -> list[str]:
        """Return the keys of the metric objects whose tallies are sent."""
        return [key for key, line in self.lines.items() if line.path is not None] if self._guard is not None else []

    def _agree(self, mine: Mapping[str, Share]) -> None:
        """Add the lines of all ranks to the list, in rank order."""
        proposed = self._strategy.ranks.all.all_gather_object([self._described(share) for share in mine.values()])
        for rank, lines in enumerate(proposed):
            for line in lines:
                known = self.lines.setdefault(line.key, line)
                if known != line:
                    raise _two_ways(known, line, rank)
        homeless = [line for line in self.lines.values() if line.path == ""]
        if not homeless:
            return
        lacking = self._strategy.ranks.all.all_gather_object(
            [line.name for line in homeless if line.key not in self._metrics]
        )
        for rank, names in enumerate(lacking):
            if names:
                raise ModuleError(
                    f"self.log({names[0]!r}, metric) was not called on rank {rank}, which must take part in computing "
                    f"it but finds no such metric in {type(self._module).__name__}; assign the metric to an attribute "
                    "of the module."
                )

    def _described(self, share: Share) -> Line:
        if share.computed is None:
            return share.line
        parts = self._module.named_modules() if self._module is not None else ()
        return replace(share.line, path=next((path for path, part in parts if part is share.computed), ""))

    def _with_values(self, mine: Mapping[str, Share], partials: dict[str, Partial]) -> dict[str, Partial]:
        """Replace the totals of functions with the values of all ranks, at the cost of another, slow collective."""
        keys = [key for key in partials if self.lines[key].reduce_fx == "function" and self.lines[key].path is None]
        if not keys:
            return partials
        rank = self._strategy.rank
        own = {key: mine[key].accumulator.partial()[0].cpu() for key in keys if rank in partials[key].ranks}
        of_ranks = self._strategy.ranks.all.all_gather_object(own)
        for key in keys:
            values = torch.cat([values[key] for values in of_ranks if key in values])
            partials[key] = partials[key]._replace(total=values)
        return partials

    def _call_functions(self, mine: Mapping[str, Share], partials: Mapping[str, Partial]) -> dict[str, Tensor]:
        """Return the values of functions: one rank calls each function and sends the result to the others."""
        keys = [key for key in partials if self.lines[key].reduce_fx == "function" and self.lines[key].path is None]
        if not keys:
            return {}
        rank = self._strategy.rank
        own = {
            key: mine[key].accumulator.result(partials[key].total, partials[key].weight).detach().cpu()
            for key in keys
            if partials[key].ranks[0] == rank
        }
        return {
            key: value for values in self._strategy.ranks.all.all_gather_object(own) for key, value in values.items()
        }

    def _compute(self, line: Line) -> Tensor | None:
        metric = self._metrics.get(line.key)
        if metric is None:
            assert self._module is not None
            found = dict(self._module.named_modules())[line.path or ""]
            assert isinstance(found, ComputedMetric)
            gather_once(found, self._strategy)
            metric = self._metrics[line.key] = found
        with warnings.catch_warnings():
            # torchmetrics warns on a rank without a batch, but the value comes from the other ranks
            warnings.filterwarnings("ignore", message=r".*``compute`` method of metric .* called before the ``update``")
            return computed_value(line.name, metric)


def _merge_totals(line: Line, totals: Sequence[float]) -> Tensor:
    if line.reduce_fx in ("min", "max"):
        return getattr(torch.tensor(totals, dtype=torch.float64), line.reduce_fx)()  # type: ignore[no-any-return]
    return torch.tensor(functools.reduce(operator.add, totals), dtype=torch.float64)


def _two_ways(known: Line, other: Line, rank: int) -> ModuleError:
    found = [
        f"{one.name}={getattr(known, one.name)!r} and {getattr(other, one.name)!r}"
        for one in fields(Line)
        if one.compare and getattr(known, one.name) != getattr(other, one.name)
    ]
    return ModuleError(
        f"self.log({known.name!r}, ...) was called on rank {rank} in a different way than on a lower rank: "
        f"{', '.join(found)}; use one way, or two names."
    )
