"""Output of commands: text from files, safe to print to a terminal, and figures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...callbacks.helpers.console import say
from ...strategies.errors import EchelonError


def printable(text: str) -> str:
    """Return the text with its control characters and lone surrogates escaped, except for line ends."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def draw_for_command(draw: Callable[[Path], None], asked: Path | None, usual: Path, *, prints_json: bool) -> None:
    """Draw what a command shows, and say where; why there is no figure is an error only if one was asked for.

    Args:
        draw: draws into a PNG file.
        asked: the file that the user has named.
        usual: the file otherwise; beside JSON there is none then.
        prints_json: whether the command prints JSON, and nothing else.

    Raises:
        EchelonError: that of `draw`, if the user has named a file.
    """
    if prints_json and asked is None:
        return
    target = asked or usual
    try:
        draw(target)
    except EchelonError as error:
        if asked is not None:
            raise
        say(f"There is no figure: {error}")
    else:
        if not prints_json:
            say(f"Drawn as {target}.")
