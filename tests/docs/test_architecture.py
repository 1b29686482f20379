"""The architecture page is accurate: its rooms are those of the layer test, its names those of the code."""

import re

from rooms import PAGE, page

from echelon import Callback
from echelon.strategies import Placed, SingleDeviceStrategy


def section(title):
    return PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def names_in_first_column(text):
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`(\w+)", cell)]


def test_the_table_of_rooms_is_that_of_the_layer_test():
    assert PAGE.read_text() == page(), "run `python tests/docs/rooms.py`"


def test_the_seam_names_what_a_strategy_has():
    seam = section("The seam: Strategy and Placed").partition("`strategy.ranks` holds")[0]
    of_strategy, of_placed = seam.split("And of what it has placed")
    for kind, text in ((SingleDeviceStrategy(), of_strategy), (Placed, of_placed)):
        names = names_in_first_column(text)
        assert len(names) > 10
        assert [name for name in names if name not in dir(kind)] == []


def test_the_loop_is_short_and_names_hooks_that_exist():
    text = section("The loop")
    hooks = re.findall(r"\bon_\w+", text)
    assert len(hooks) > 5 and [name for name in hooks if not hasattr(Callback, name)] == []
    [loop] = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert len(loop.splitlines()) <= 25
