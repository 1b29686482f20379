"""Debug mode of collectives: ranks that make different calls get an error with a table instead of a hang."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import torch
from torch import Tensor

from ...common.errors import CollectiveError
from .nested import named_leaves
from .noticeboard import Messages, Noticeboard
from .point_to_point import PendingTransfer

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_STRATEGIES: Final = Path(__file__).parents[1]
_PACKAGE: Final = _STRATEGIES.parent
_OURS: Final = (_STRATEGIES, *(_PACKAGE / floor for floor in ("trainer", "callbacks", "lightning")))
_TORCH: Final = Path(torch.__file__).parent
_WRAPPERS: Final = ("wrapper", "_fn", "inner", "decorate_context", "__call__", "_call_impl", "_wrapped_call_impl")
"""Functions of torch and of this package that only call others."""
_LONGEST_SHAPES: Final = 160  # characters

Aspect = Literal["name", "shapes", "where"]


@dataclass(frozen=True)
class Call:
    """Description of one rank's call of a collective, for comparison with the other ranks' calls."""

    name: str
    """The operation, with the arguments that must be the same on all ranks, such as ``broadcast(src=0)``."""
    shapes: str
    """The structure, with the type and shape of every leaf."""
    where: str
    compared: Sequence[Aspect]
    """The fields that must be the same on all ranks."""


def call_here(name: str, data: object, compared: Sequence[Aspect]) -> Call:
    """Return a description of this rank's call; the line is compared only if it is in the user's code."""
    where, is_users = _find_caller()
    return Call(name, shapes_of(data), where, [aspect for aspect in compared if aspect != "where" or is_users])


class CollectiveChecks:
    """Compares calls across ranks before they run, through the store, since the process group itself would hang.

    Every rank posts its call, waits for the others' calls, and votes; the first vote counts for all, so that no rank
    enters a collective that another has given up on. The last rank to read the messages removes them.
    """

    def __init__(self, store: Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        run = Noticeboard(store, "calls").count(f"runs/{rank}")  # an earlier run that failed may have left messages
        self._board = Noticeboard(store, f"calls/{run}")
        self._rank = rank
        self._all_ranks = ranks
        self._timeout = timeout.total_seconds()
        self._num_posted: Counter[str] = Counter()

    def check(self, call: Call) -> None:
        """Wait until every rank has made the same call.

        Raises:
            CollectiveError: on every rank that made a call, if one made a different call, or none in time.
        """
        self.post(call, "all", self._all_ranks).check()

    def post(self, call: Call, channel: str, ranks: Sequence[int]) -> PostedCall:
        """Post a call for the other ranks; it is compared with theirs by `PostedCall.check`.

        Args:
            call: the call that this rank is about to make.
            channel: name of the sequence of calls between `ranks`; a rank's n-th call is compared with others' n-th.
            ranks: the ranks that take part.
        """
        self._num_posted[channel] += 1
        number = self._num_posted[channel]
        base = f"{channel}/{number}"
        self._board.post(f"last/{self._rank}", asdict(call))
        self._board.post(f"{base}/{self._rank}", asdict(call))
        return PostedCall(self, base, number, ranks)

    def compare(self, base: str, number: int, ranks: Sequence[int]) -> None:
        """Wait for all `ranks`, and vote; see `check`."""
        keys, verdict = [f"{base}/{rank}" for rank in ranks], f"{base}/verdict"
        messages = self._board.wait_for(keys, self._timeout)
        calls = {rank: Call(**messages[key]) for rank, key in zip(ranks, keys, strict=True) if key in messages}
        missing = [rank for rank in ranks if rank not in calls]
        problem = self._board.post_first(verdict, self._problem(calls, missing, number))
        self._board.remove_once_read(len(ranks), *keys, verdict)
        if problem is not None:
            raise CollectiveError(problem)

    def _problem(self, calls: dict[int, Call], missing: list[int], number: int) -> str | None:
        different = _find_differences(list(calls.values()))
        if not missing and not different:
            return None
        shown = {rank: _format_call(call) for rank, call in calls.items()} | {
            rank: self._last_call(rank) for rank in missing
        }
        rows = [["rank", "call", "shapes", "where"], *([str(rank), *shown[rank]] for rank in sorted(shown))]
        if missing:
            reason = f"rank {', '.join(map(str, missing))} did not arrive within {self._timeout:g} s"
            remedy = "Make the same calls in the same order on all ranks: look for a branch that depends on the rank"
        else:
            reason = f"the ranks differ in {' and '.join(different)}"
            remedy = (
                "Make the same call on all ranks, or use gather or all_gather_object where shapes differ on purpose"
            )
        return f"Collective {number} cannot run: {reason}.\n{describe_table(rows)}\n{remedy}."

    def _last_call(self, rank: int) -> list[str]:
        last: Messages | None = self._board.read(f"last/{rank}")
        if last is None:
            return ["(not here; no call yet)", "", ""]
        name, *others = _format_call(Call(**last))
        return [f"(not here; last: {name})", *others]


@dataclass(frozen=True)
class PostedCall:
    """Call that was posted for the other ranks and has not been compared yet."""

    checks: CollectiveChecks
    base: str
    number: int
    ranks: Sequence[int]

    def check(self) -> None:
        """Wait for the other ranks, and compare their calls with this one; see `CollectiveChecks.check`."""
        self.checks.compare(self.base, self.number, self.ranks)


def _find_differences(calls: Sequence[Call]) -> list[str]:
    aspects = {"name": "the operation", "shapes": "structure, shapes or types", "where": "the line that calls"}
    return [
        text
        for aspect, text in aspects.items()
        if len({getattr(call, aspect) for call in calls if aspect in call.compared}) > 1
    ]


def _format_call(call: Call) -> list[str]:
    shapes = call.shapes if len(call.shapes) <= _LONGEST_SHAPES else call.shapes[: _LONGEST_SHAPES - 4] + " ..."
    return [call.name, shapes, call.where]


def describe_table(rows: list[list[str]]) -> str:
    """Return a table as text; the first row has the column names."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def shapes_of(data: object) -> str:
    """Return the leaves of a structure, each with its type and shape, in the same order on all ranks."""
    return ", ".join(sorted(f"{name} {_describe_leaf(leaf)}".lstrip() for name, leaf in named_leaves(data)))


def _describe_leaf(leaf: object) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" + (
        " +grad" if leaf.requires_grad and torch.is_grad_enabled() else ""
    )


def user_call() -> str:
    """Return the function of torch or of this package that the user's code has called, with the file and line."""
    called, file, line = _call_into(*_OURS, _TORCH)
    return f"{called} ({file}:{line})"


def _find_caller() -> tuple[str, bool]:
    """Return the file and line of the call into strategies/, and whether they are in the user's code."""
    _, file, line = _call_into(_STRATEGIES, _TORCH)
    return f"{file}:{line}", not _is_below(file, _PACKAGE / "trainer", _PACKAGE / "callbacks")


def _call_into(*folders: Path) -> tuple[str, str, int]:
    """Return the function of these folders that code outside of them has called, and the file and line of the call."""
    frame = inspect.currentframe()
    assert frame is not None  # CPython has frames
    called = ""
    while frame.f_back is not None and _is_below(frame.f_code.co_filename, *folders):
        name = frame.f_code.co_name
        called = name if name not in _WRAPPERS else called
        frame = frame.f_back
    return called, frame.f_code.co_filename, frame.f_lineno


def _is_below(file: str, *folders: Path) -> bool:
    return any(Path(file).is_relative_to(folder) for folder in folders)


class _CheckedTransfer:
    """A transfer whose call is compared with the other rank's before it is waited for."""

    def __init__(self, posted: PostedCall, transfer: PendingTransfer) -> None:
        self._posted: PostedCall | None = posted
        self._transfer = transfer

    def wait(self) -> object:
        if self._posted is not None:
            self._posted.check()
            self._posted = None
        return self._transfer.wait()


def checked_transfer(posted: PostedCall | None, transfer: PendingTransfer) -> PendingTransfer:
    """Return a transfer whose call, if it was posted, is compared with the other rank's before it is waited for."""
    return transfer if posted is None else _CheckedTransfer(posted, transfer)
