"""Output of commands: text from files, made safe to print to a terminal, and figures."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

from ...common.console import say
from ...common.errors import EchelonError
from ...common.storage import AnyPath, as_path, writing_local_file


def make_printable(text: str) -> str:
    """Return the text with control characters, except line ends, and lone surrogates escaped."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def with_noun(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def in_bytes(size: int) -> str:
    """Return a number of bytes in a unit that suits it."""
    amount = float(size)
    for unit in ("B", "KB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def terminal_width() -> int | None:
    """Return the columns of the terminal that is standard output; None where it is a file or a pipe."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


class TerminalHelp(argparse.HelpFormatter):
    """Help as wide as the terminal: prose is filled, and examples keep their lines where these fit."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        is_open = False  # the line before is prose that goes on
        for line in text.splitlines():
            is_prose = bool(line) and not line.startswith(" ")
            if is_prose and is_open:
                lines[-1] += f" {line}"
            else:
                lines.append(line)
            is_open = is_prose and not line.endswith(":")
        return "\n".join(part for line in lines for part in _fold_line(indent + line, width))


def _fold_line(line: str, width: int) -> list[str]:
    """Return a line in parts that fit; what follows a gap, a comment say, goes below first."""
    if len(line) <= width:
        return [line]
    margin = line[: len(line) - len(line.lstrip())]
    command, gap, comment = line.lstrip().partition("   ")
    if gap and margin:
        return [*_fold_line(margin + command, width), *_fold_line(f"{margin}    {comment.strip()}", width)]
    further = margin + "    " if margin else ""
    words = textwrap.TextWrapper(width, margin, further, break_long_words=False, break_on_hyphens=False)
    return words.wrap(line.strip()) or [line]


def draw_for_command(draw: Callable[[Path], None], asked: AnyPath | None, usual: AnyPath, *, prints_json: bool) -> None:
    """Draw a command's figure and print its path; a failure is an error only if the user asked for a figure.

    Args:
        draw: draws to a PNG file.
        asked: the file that the user has named, which may be in a store.
        usual: the file otherwise; with JSON, none is drawn then.
        prints_json: whether the command prints JSON, and nothing else.

    Raises:
        EchelonError: from `draw`, if the user has named a file.
    """
    if prints_json and asked is None:
        return
    target = as_path(asked or usual)
    try:
        with writing_local_file(target) as file:
            draw(file)
    except EchelonError as error:
        if asked is not None:
            raise
        say(f"No figure was drawn: {error}")
    else:
        if not prints_json:
            say(f"Drawn as {target}.")
