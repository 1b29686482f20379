"""Table of rooms in docs/architecture.md, made from the order in test_layers.py and the first line of each room.

Usage: python tests/docs/rooms.py; test_architecture.py fails until the page is what this makes of it.
"""

import ast
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from test_layers import LEVELS, ROOT

PAGE = ROOT / "docs" / "architecture.md"


def row(room):
    """Return the line of a room: where it is, and the first line of its docstring."""
    path = ROOT.joinpath(*room.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    name = f"{path.relative_to(ROOT)}/" if path.is_dir() else str(file.relative_to(ROOT))
    return f"| [{name}](../{name}) | {ast.get_docstring(ast.parse(file.read_text())).splitlines()[0]} |"


def page():
    """Return the page as it should be."""
    rows = [row(room) for rooms in LEVELS for room in rooms]
    return page_with("rooms", ["| room | |", "|---|---|", *rows])


def page_with(name, table):
    """Return the page with the lines of a table between the comments ``name`` and ``end of name``."""
    between = re.compile(rf"(<!-- {name} -->\n).*(<!-- end of {name} -->\n)", re.DOTALL)
    lines = "".join(f"{line}\n" for line in table)
    text, count = between.subn(lambda found: f"{found[1]}{lines}{found[2]}", PAGE.read_text())
    assert count == 1, f"{PAGE.name} must have one pair of the comments {name!r} and 'end of {name}', got {count}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
