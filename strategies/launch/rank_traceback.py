"""Traceback of an error in a worker: the frames that users see, and how to rebuild it in the caller."""

from __future__ import annotations

import ast
import sysconfig
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import torch

_PACKAGE: Final = Path(__file__).parents[2]
_OWN: Final = tuple(f"{_PACKAGE / name}/" for name in ("strategies", "callbacks", "trainer"))
_LIBRARIES: Final = tuple(f"{Path(path)}/" for path in (Path(torch.__file__).parent, sysconfig.get_path("stdlib")))
_INSTALLED: Final = ("site-packages/", "dist-packages/")  # these may be below the standard library


@dataclass(frozen=True)
class Frame:
    """Position of a call, as shown in a traceback."""

    file: str
    name: str
    line: int
    end_line: int
    column: int
    end_column: int

    @classmethod
    def of(cls, summary: traceback.FrameSummary) -> Self:
        """Return the position in a frame summary; unknown columns are -1."""
        line = summary.lineno or 1
        if summary.colno is None or summary.end_colno is None:
            return cls(summary.filename, summary.name, line, line, -1, -1)
        end_line = summary.end_lineno or line
        return cls(summary.filename, summary.name, line, end_line, summary.colno, summary.end_colno)

    @property
    def is_own(self) -> bool:
        """Whether it is in Echelon's code."""
        return self.file.startswith(_OWN)

    @property
    def is_users(self) -> bool:
        """Whether it is in none of Echelon, torch and Python itself."""
        is_torch_or_python = self.file.startswith(_LIBRARIES) and not self._is_installed
        return not (self.is_own or is_torch_or_python or self.file.startswith("<frozen"))

    @property
    def _is_installed(self) -> bool:
        return any(folder in self.file for folder in _INSTALLED) and not self.file.startswith(_LIBRARIES[0])


def frames_for_users(error: BaseException) -> list[Frame]:
    """Return an error's frames starting with the user's first one; all of them if Echelon itself raised it."""
    frames = [Frame.of(summary) for summary in traceback.extract_tb(error.__traceback__)]
    if not frames or frames[-1].is_own:
        return frames
    first = next((index for index, frame in enumerate(frames) if frame.is_users), 0)
    return frames[first:]


def rebuild_traceback(frames: Sequence[Frame]) -> TracebackType | None:
    """Return a traceback that shows these frames, without their variables, which stayed in the worker."""
    rebuilt: TracebackType | None = None
    for frame in reversed(frames):
        own = _raised_at(frame)
        rebuilt = TracebackType(rebuilt, own.tb_frame, own.tb_lasti, own.tb_lineno)
    return rebuilt


def _raised_at(frame: Frame) -> TracebackType:
    """Raise an error at this position of this file, and return its traceback."""
    place = {
        "lineno": frame.line,
        "end_lineno": frame.end_line,
        "col_offset": frame.column,
        "end_col_offset": frame.end_column,
    }
    raising = ast.Module([ast.Raise(ast.Name("RuntimeError", ast.Load(), **place), None, **place)], [])
    code = compile(raising, frame.file, "exec").replace(co_name=frame.name)
    try:
        exec(code, {"__name__": frame.file})  # noqa: S102 - code of one `raise`, made above
    except RuntimeError as error:
        own = error.__traceback__
    assert own is not None and own.tb_next is not None  # the first entry is this function's
    return own.tb_next
