"""A real pseudo-terminal as standard output, and what is visible on it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


class Terminal:
    """What was written to a pseudo-terminal."""

    def __init__(self) -> None:
        self.written = ""

    @property
    def screen(self) -> list[str]:
        """The lines that are visible now, without empty ones at the end; supports the control characters of tqdm."""
        lines: list[list[str]] = [[]]
        row = column = 0
        text = self.written.replace("\x1b[A", "\x00")
        for character in text:
            if character == "\r":
                column = 0
            elif character == "\n":
                row += 1
                if row == len(lines):
                    lines.append([])
            elif character == "\x00":
                row = max(row - 1, 0)
            else:
                line = lines[row]
                line.extend(" " * (column + 1 - len(line)))
                line[column] = character
                column += 1
        shown = ["".join(line).rstrip() for line in lines]
        while shown and not shown[-1]:
            shown.pop()
        return shown


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, columns: int = 100) -> Iterator[Terminal]:
    """Make standard output a pseudo-terminal inside the block; afterwards, everything written can be read."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    seen = Terminal()
    chunks: list[bytes] = []

    def read() -> None:
        while True:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # raised on Linux when the other end is closed
                return
            if not chunk:
                return
            chunks.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    stream = os.fdopen(follower, "w", encoding="utf-8", buffering=1)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        try:
            yield seen
        finally:
            stream.close()
            reader.join()
            os.close(leader)
            seen.written = b"".join(chunks).decode()
