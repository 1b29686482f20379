"""The debug mode of collectives: ranks that do not call the same one get an error with a table instead of a hang."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from ..errors import CollectiveError
from .nested import named_leaves

_HERE: Final = Path(__file__).parent
_TORCH: Final = Path(torch.__file__).parent
_SHOWN: Final = 160  # characters of a long list of shapes
_AGREED: Final = "agreed"

Aspect = Literal["name", "shapes", "where"]


@dataclass(frozen=True)
class Call:
    """One rank's call of a collective, as the other ranks get to see it."""

    name: str
    """The operation with what all ranks have to give alike, such as ``broadcast(src=0)``."""
    shapes: str
    """The structure, with the type and the shape of every leaf."""
    where: str
    compared: Sequence[Aspect]
    """What has to be the same on all ranks."""


def call_here(name: str, data: Any, compared: Sequence[Aspect]) -> Call:
    """Return this rank's call; the line it comes from is compared only where it is the user's."""
    where, is_users = _caller()
    return Call(name, _shapes(data), where, [aspect for aspect in compared if aspect != "where" or is_users])


class CollectiveChecks:
    """Compares calls across ranks before they run, through the store: the process group itself would hang.

    Every rank writes its call under one key, waits for those of the others, and votes; the first vote is everyone's, so
    that no rank enters a collective that another has given up. Keys are deleted when the last rank has read them.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout: timedelta) -> None:
        generation = store.add(f"calls/generation/{rank}", 1)  # keys of an earlier run that failed are not ours
        self._store = store
        self._prefix = f"calls/{generation}"
        self._rank = rank
        self._everyone = list(range(world_size))
        self._timeout = timeout
        self._num_posted: Counter[str] = Counter()

    def check(self, call: Call) -> None:
        """Return when every rank is here with the same call.

        Raises:
            CollectiveError: on every rank that came, if one called something else or did not come in time.
        """
        self.post(call, "all", self._everyone).check()

    def post(self, call: Call, channel: str, ranks: Sequence[int]) -> PostedCall:
        """Tell the others of a call that is checked later.

        Args:
            call: what this rank is about to do.
            channel: names a sequence of calls that these ranks share; the n-th on one meets the n-th on the others.
            ranks: who takes part.
        """
        self._num_posted[channel] += 1
        text = json.dumps(asdict(call))
        number = self._num_posted[channel]
        base = f"{self._prefix}/{channel}/{number}"
        self._store.set(f"{self._prefix}/last/{self._rank}", text)
        self._store.set(f"{base}/{self._rank}", text)
        return PostedCall(self, base, number, ranks)

    def compare(self, base: str, number: int, ranks: Sequence[int]) -> None:
        """Wait for all `ranks`, and vote; see `check`."""
        keys = {rank: f"{base}/{rank}" for rank in ranks}
        with suppress(RuntimeError):  # torch's DistStoreError is one; a store that is gone raises again below
            self._store.wait(list(keys.values()), self._timeout)
        missing = [rank for rank, key in keys.items() if not self._store.check([key])]
        calls = {rank: self._read(key) for rank, key in keys.items() if rank not in missing}
        verdict = self._store.compare_set(f"{base}/verdict", "", self._verdict(calls, missing, number)).decode()
        if self._store.add(f"{base}/readers", 1) == len(ranks):
            for key in (*keys.values(), f"{base}/verdict", f"{base}/readers"):
                self._store.delete_key(key)
        if verdict != _AGREED:
            raise CollectiveError(verdict)

    def _read(self, key: str) -> Call:
        return Call(**json.loads(self._store.get(key)))

    def _verdict(self, calls: dict[int, Call], missing: list[int], number: int) -> str:
        different = _differences(list(calls.values()))
        if not missing and not different:
            return _AGREED
        shown = {rank: _cells(call) for rank, call in calls.items()} | {rank: self._last_call(rank) for rank in missing}
        rows = [["rank", "call", "shapes", "where"], *([str(rank), *shown[rank]] for rank in sorted(shown))]
        if missing:
            late = ", ".join(map(str, missing))
            what = f"rank {late} did not come within {self._timeout.total_seconds():g} s"
            remedy = (
                "Every rank has to make the same calls in the same order: look for a branch that depends on the rank"
            )
        else:
            what = f"the ranks differ in {' and '.join(different)}"
            remedy = (
                "Make the same call on every rank, or, where shapes differ by design, use gather or all_gather_object"
            )
        return f"Collective {number} cannot run: {what}.\n{_table(rows)}\n{remedy}."

    def _last_call(self, rank: int) -> list[str]:
        key = f"{self._prefix}/last/{rank}"
        if not self._store.check([key]):
            return ["(not here; no call yet)", "", ""]
        name, *others = _cells(self._read(key))
        return [f"(not here; last: {name})", *others]


@dataclass(frozen=True)
class PostedCall:
    """A call that the other ranks may know of already."""

    checks: CollectiveChecks
    base: str
    number: int
    ranks: Sequence[int]

    def check(self) -> None:
        """Wait for the others, as `CollectiveChecks.check` does."""
        self.checks.compare(self.base, self.number, self.ranks)


def _differences(calls: Sequence[Call]) -> list[str]:
    aspects = {"name": "the operation", "shapes": "structure, shapes or types", "where": "the line that calls"}
    return [
        text
        for aspect, text in aspects.items()
        if len({getattr(call, aspect) for call in calls if aspect in call.compared}) > 1
    ]


def _cells(call: Call) -> list[str]:
    shapes = call.shapes if len(call.shapes) <= _SHOWN else call.shapes[: _SHOWN - 4] + " ..."
    return [call.name, shapes, call.where]


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _shapes(data: Any) -> str:
    """Return the leaves of a structure, each with its type and shape; in an order that ranks share."""
    return ", ".join(sorted(f"{name} {_describe(leaf)}".lstrip() for name, leaf in named_leaves(data)))


def _describe(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" + (
        " +grad" if leaf.requires_grad and torch.is_grad_enabled() else ""
    )


def _caller() -> tuple[str, bool]:
    """Return file and line of whoever called into this folder, and whether it is code of the user's."""
    frame = inspect.currentframe()
    assert frame is not None  # CPython has frames
    while frame.f_back is not None and _is_below(frame.f_code.co_filename, _HERE, _TORCH):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return f"{file}:{frame.f_lineno}", not _is_below(file, _HERE.parent / "trainer", _HERE.parent / "callbacks")


def _is_below(file: str, *folders: Path) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in folders)
