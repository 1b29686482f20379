"""Moving picture of a program in a terminal: ``python docs/recording.py`` runs the demo and draws docs/demo.svg.

What the program writes to a real pseudo-terminal is replayed on a screen of lines, in the program's own time; a picture
of each moment becomes a frame of one SVG, which needs neither a script nor a player.
"""

from __future__ import annotations

import argparse
import fcntl
import html
import os
import pty
import shutil
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

EXAMPLE: Final = Path(__file__).parents[1] / "examples" / "digits.py"
ROWS, COLUMNS = 24, 88
FRAMES, FILM_SECONDS, END_SECONDS = 40, 10.0, 4.0
CHARACTER, LINE, MARGIN, TITLE = 8.0, 17, 12, 30
"""Sizes in the units of the picture."""

_STYLE: Final = """\
text {{ font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d7dae0; }}
text {{ white-space: pre; }}
.title {{ fill: #8b929e; }}
#film {{ animation: film {seconds}s step-end infinite; }}
@keyframes film {{ {moments} }}
@media (prefers-reduced-motion: reduce) {{ #film {{ animation: none; transform: translateX(-{last}px); }} }}"""


@dataclass(frozen=True)
class Written:
    """What a program wrote, and when."""

    seconds: float
    text: str


class Screen:
    """The lines of a terminal, as carriage returns, line feeds and moves up change them."""

    def __init__(self, rows: int = ROWS, columns: int = COLUMNS) -> None:
        self.lines = [""]
        self._rows, self._columns, self._line, self._column = rows, columns, 0, 0

    def write(self, text: str) -> None:
        """Show a text.

        Raises:
            ValueError: for an escape sequence other than a move up, which is all that a progress bar needs.
        """
        for part in text.replace("\x1b[A", "\x00"):
            if part == "\r":
                self._column = 0
            elif part == "\n":
                self._go_down()
            elif part == "\x00":
                self._line = max(0, self._line - 1)
            elif part == "\x1b":
                raise ValueError(f"an escape sequence that is not drawn, in {text!r}; Screen knows moves up only")
            else:
                if self._column == self._columns:  # a line that is full goes on in the next
                    self._go_down()
                    self._column = 0
                line = self.lines[self._line].ljust(self._column)
                self.lines[self._line] = line[: self._column] + part + line[self._column + 1 :]
                self._column += 1

    def _go_down(self) -> None:
        self._line += 1
        self.lines += [""] * (self._line + 1 - len(self.lines))

    def shown(self) -> list[str]:
        """Return the lines in view: the last ones."""
        return [line.rstrip() for line in self.lines[-self._rows :]]


def record(words: Sequence[str], folder: Path) -> list[Written]:
    """Run ``python *words`` in a folder, on a terminal of its own, and return what it wrote.

    Raises:
        RuntimeError: if the program fails.
    """
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execv(sys.executable, [sys.executable, *words])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    written: list[Written] = []
    began, rest = time.monotonic(), b""
    while True:
        try:
            rest += os.read(terminal, 65536)
        except OSError:  # the program has closed it
            break
        end = len(rest) if not rest[-3:].strip(b"\x80\x81") else max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
        text = rest[:end].decode(errors="replace")
        written, rest = [*written, Written(time.monotonic() - began, text)], rest[end:]
    os.close(terminal)
    _, status = os.waitpid(process, 0)
    if status:
        raise RuntimeError(f"python {' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}; run it by hand")
    return [*written, Written(time.monotonic() - began, rest.decode(errors="replace"))]


def frames(written: Sequence[Written], command: str) -> list[tuple[float, list[str]]]:
    """Return what the screen shows at a few moments, and how far through the film each is, from 0 to 1."""
    screen, found = Screen(), [(0.0, [f"$ {command}"])]
    screen.write(f"$ {command}\r\n")
    begin = next((each.seconds for each in written if each.text), 0.0)  # what Python imports shows nothing
    span = max(written[-1].seconds - begin, 1e-9)
    share = FILM_SECONDS / (FILM_SECONDS + END_SECONDS)
    for each in written:
        screen.write(each.text)
        place = (each.seconds - begin) / span * share
        if place - found[-1][0] >= share / FRAMES:
            found.append((place, screen.shown()))
    return [*found, (share, screen.shown())]


def draw(film: Sequence[tuple[float, list[str]]], title: str) -> str:
    """Return the SVG: the frames side by side, moved past a window one at a time."""
    width, height = round(2 * MARGIN + COLUMNS * CHARACTER), 2 * MARGIN + TITLE + ROWS * LINE
    names: dict[str, str] = {}
    groups = []
    for number, (_, lines) in enumerate(film):
        uses = []
        for row, line in enumerate(lines):
            if line:
                name = names.setdefault(line, f"l{len(names)}")
                uses.append(f'<use href="#{name}" y="{row * LINE}"/>')
        groups.append(f'<g transform="translate({number * width})">{"".join(uses)}</g>')
    texts = "\n".join(
        f'<text id="{name}" textLength="{len(line) * CHARACTER:.0f}">{html.escape(line, quote=False)}</text>'
        for line, name in names.items()
    )
    moments = " ".join(
        f"{100 * place:.2f}% {{ transform: translateX(-{number * width}px); }}"
        for number, (place, _) in enumerate(film)
    )
    style = _STYLE.format(seconds=FILM_SECONDS + END_SECONDS, moments=moments, last=(len(film) - 1) * width)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f"<style>\n{style}\n</style>\n<defs>\n{texts}\n</defs>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#1d2026"/>\n'
        f'<text class="title" x="{MARGIN}" y="{MARGIN + 10}">{html.escape(title)}</text>\n'
        f'<svg x="{MARGIN}" y="{TITLE}" width="{width - 2 * MARGIN}" height="{height - TITLE}">\n'
        f'<g transform="translate(0 {LINE})"><g id="film">\n' + "\n".join(groups) + "\n</g></g>\n</svg>\n</svg>\n"
    )


def main() -> None:
    """Record the demo, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("file", type=Path, nargs="?", default=Path(__file__).with_name("demo.svg"))
    target: Path = parser.parse_args().file
    folder = Path(tempfile.mkdtemp(prefix="digits_"))
    try:
        written = record([str(EXAMPLE)], folder)
    finally:
        shutil.rmtree(folder)
    here = {str(folder): "~/digits", sys.executable: "python"}  # paths of this machine say nothing to readers
    texts = [each.text for each in written]
    for path, name in here.items():
        texts = [text.replace(path, name) for text in texts]
    written = [Written(each.seconds, text) for each, text in zip(written, texts, strict=True)]
    began = next(each.seconds for each in written if each.text)
    seconds = written[-1].seconds - began
    title = f"make demo, {seconds:.0f} s of one recorded run, shown in {FILM_SECONDS:.0f}"
    target.write_text(draw(frames(written, "make demo"), title))


if __name__ == "__main__":
    main()
