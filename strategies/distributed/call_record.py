"""Record of a rank's last collectives in a file, which shows after its end where the ranks diverged."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Self

from ...common.internals.stack_frames import find_frame
from ..cluster.environment import calls_file
from .debug import describe_table

_PACKAGE: Final = Path(__file__).parents[2]
_PASSED: Final = (*(f"{_PACKAGE / name}/" for name in ("strategies", "callbacks", "trainer")), contextlib.__file__)
_ECHELON: Final = "Echelon itself"
_SEPARATOR: Final = "\t"
_LACKS_A_CALL: Final = "(none)"

_NUM_KEPT: Final = 64
_WIDTH: Final = 256  # bytes per call; long paths lose their beginning
_NUMBER: Final = 8  # bytes
_SIZE: Final = _NUMBER + _NUM_KEPT * _WIDTH


class CallRecord:
    """The last calls of one process, in a memory-mapped file: a call costs 3 us, and survives even an abort."""

    def __init__(self, file: Path) -> None:
        with file.open("ab") as opened:
            opened.truncate(_SIZE)  # never to 0: an earlier record of this process may still write there
        with file.open("r+b") as opened:
            self._memory = mmap.mmap(opened.fileno(), _SIZE)
        self._count = 0
        self._write_count()

    @classmethod
    def of_this_process(cls) -> Self | None:
        """Return the record of a worker that Echelon started; None in any other process."""
        file = calls_file()
        return None if file is None else cls(file)

    def note(self, name: str) -> None:
        """Record that this rank calls a collective."""
        where = _find_caller()
        room = _WIDTH - len(name) - len(_SEPARATOR)
        begin = _NUMBER + self._count % _NUM_KEPT * _WIDTH
        call = f"{name}{_SEPARATOR}{where[-room:]}".encode(errors="replace")[:_WIDTH]
        self._memory[begin : begin + _WIDTH] = call.ljust(_WIDTH, b"\0")
        self._count += 1
        self._write_count()

    def _write_count(self) -> None:
        self._memory[:_NUMBER] = self._count.to_bytes(_NUMBER, "little")


def _find_caller() -> str:
    """Return the file and line of the user's call; for Echelon's own calls, a fixed text."""
    frame = find_frame(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED):
        if frame.f_code.co_name == "run_worker":
            return _ECHELON
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _read_calls(file: Path) -> tuple[int, dict[int, list[str]]]:
    """Return how many calls a process has made, and the last of them by number, each as name and place."""
    content = file.read_bytes() if file.exists() else bytes(_SIZE)
    count = int.from_bytes(content[:_NUMBER], "little")
    calls = {}
    for number in range(max(0, count - _NUM_KEPT), count):
        begin = _NUMBER + number % _NUM_KEPT * _WIDTH
        calls[number] = content[begin : begin + _WIDTH].rstrip(b"\0").decode(errors="replace").split(_SEPARATOR)
    return count, calls


def describe_difference(files: Mapping[int, Path]) -> str | None:
    """Describe where the calls of ranks began to differ, given each one's file; None if the records do not show that.

    Ranks may call the same collective from different lines of the user's code, but not one from Echelon and one from
    the user's code. Different lines count only if the calls differ later on.
    """
    counts, calls = {}, {}
    for rank, file in files.items():
        counts[rank], calls[rank] = _read_calls(file)
    first = max((count - _NUM_KEPT for count in counts.values()), default=0)
    numbers = range(max(0, first), max(counts.values(), default=0))

    def differs(number: int, *, by_line: bool) -> bool:
        of_ranks = [calls[rank].get(number, ("", "")) for rank in files]
        return len({(name, where if by_line else where == _ECHELON) for name, where in of_ranks}) > 1

    if not any(differs(number, by_line=False) for number in numbers):
        return None
    number = next(number for number in numbers if differs(number, by_line=True))
    rows = [["rank", "call", "where"], *([str(rank), *_row_of_call(calls[rank], number)] for rank in sorted(files))]
    return (
        f"The ranks diverged at collective {number + 1} of the run:\n{describe_table(rows)}\nMake the same calls in "
        "the same order on all ranks: look for a branch that depends on the rank, and for ranks with different "
        "numbers of batches. With check_collectives=True of the strategy, the run fails before that call."
    )


def _row_of_call(calls: Mapping[int, list[str]], number: int) -> Iterable[str]:
    if number in calls:
        return calls[number]
    last = calls.get(number - 1)
    return [_LACKS_A_CALL, "" if last is None else f"last: {last[0]}, {last[-1]}"]


class StuckRanks:
    """Reports once, after a while without new calls, which ranks have diverged, as they may wait forever.

    If every rank has made the call at which they diverged, none can go on: `deadlock` says so after another while. A
    rank that has not made it may only be slow.

    Args:
        files: the record of each rank.
        patience: seconds without a new call.
    """

    def __init__(self, files: Mapping[int, Path], patience: float = 60.0) -> None:
        self._files, self._patience = files, patience
        self._counts: list[int] = []
        self._since = time.monotonic()
        self._has_said = False
        self._calls_differ = False
        """Whether the calls of all ranks at the same place differ, and not only their number."""

    def look(self) -> str | None:
        """Return the message for the user, if it is time for one."""
        counts = [_read_calls(file)[0] for file in self._files.values()]
        if counts != self._counts:
            self._counts, self._since, self._calls_differ = counts, time.monotonic(), False
        if self._has_said or time.monotonic() - self._since < self._patience:
            return None
        difference = describe_difference(self._files)
        self._has_said = difference is not None
        self._calls_differ = difference is not None and _LACKS_A_CALL not in difference
        wait = f", and the run ends after {self._patience:g} more" if self._calls_differ else ""
        return difference and f"No rank has called a collective for {self._patience:g} s{wait}. {difference}"

    def deadlock(self) -> str | None:
        """Return the difference if it keeps every rank from going on; call it after `look`."""
        if not self._calls_differ or time.monotonic() - self._since < 2 * self._patience:
            return None
        return describe_difference(self._files)
