"""Output of commands: text from files, made safe to print to a terminal, and figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...common.console import say
from ...common.errors import EchelonError


def printable(text: str) -> str:
    """Return the text with control characters, except line ends, and lone surrogates escaped."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def draw_for_command(draw: Callable[[Path], None], asked: Path | None, usual: Path, *, prints_json: bool) -> None:
    """Draw a command's figure and print its path; a failure is an error only if the user asked for a figure.

    Args:
        draw: draws to a PNG file.
        asked: the file that the user has named.
        usual: the file otherwise; with JSON, none is drawn then.
        prints_json: whether the command prints JSON, and nothing else.

    Raises:
        EchelonError: from `draw`, if the user has named a file.
    """
    if prints_json and asked is None:
        return
    target = asked or usual
    try:
        draw(target)
    except EchelonError as error:
        if asked is not None:
            raise
        say(f"No figure was drawn: {error}")
    else:
        if not prints_json:
            say(f"Drawn as {target}.")
