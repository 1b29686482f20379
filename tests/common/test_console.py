"""Messages to the console reach the right readers."""

from __future__ import annotations

import io
import sys

import pytest

from echelon.common.console import say
from echelon.common.table import render_table


def test_a_table_is_printed_where_only_ascii_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
        say(render_table([{"größe": 1.0}], "Test metric"))
        sys.stdout.flush()
        lines = written.getvalue().decode("ascii").splitlines()
    assert lines[0] == "+-------------+-------+"
    assert lines[3] == "| gr??e       |   1.0 |"
