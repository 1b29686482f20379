"""Print what each layout trains of the catalogues, as tables in Markdown.

Usage: python tests/libraries/catalogue.py [optimizers] [modules], in an environment that has the libraries.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "equivalence"))
sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from catalogue_modules import modules
from catalogue_optimizers import optimizers
from matrix import largest
from unusual_modules import LAYOUTS, End, Layout, train, train_all

from echelon.testing import run_ranks

ROWS: Mapping[str, Callable[[], Mapping[str, Callable[[], Any]]]] = {"optimizers": optimizers, "modules": modules}
TITLES = {
    "optimizers": [layout.title for layout in LAYOUTS],
    "modules": [layout.title for layout in LAYOUTS if not layout.title.startswith("pp")],
}
"""The layouts of each table. A pipeline may fail on one stage alone, after which nothing else can run there."""


def built(make: Callable[[], Any]) -> Any:
    """Return a module with the same weights in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return make()


@functools.cache
def alone(catalogue: str, global_batch: int) -> dict[str, End]:
    """Return how each row of a catalogue ends in one process."""
    layout = Layout("single", 1, lambda: "single", global_batch, devices=1)
    return {name: train(layout, built(make)) for name, make in ROWS[catalogue]().items()}


def ends_on(catalogue: str, title: str) -> dict[str, list[End]]:
    """Return how each row of a catalogue ends on each rank of a layout."""
    layout = next(layout for layout in LAYOUTS if layout.title == title)
    cells = {(title, name): built(make) for name, make in ROWS[catalogue]().items()}
    number = layout.processes
    ends = [train_all(1, cells)] if number == 1 else run_ranks(train_all, number, number, cells, timeout=1500)
    return {name: [of_rank[title, name] for of_rank in ends] for _, name in cells}


def found_on(catalogue: str, title: str) -> dict[str, float | str]:
    """Return, for each row, the difference of weights on a layout from one process, or the error."""
    layout = next(layout for layout in LAYOUTS if layout.title == title)
    expected = alone(catalogue, layout.global_batch)
    return {name: _found(ends, expected[name]) for name, ends in ends_on(catalogue, title).items()}


def _found(ends: list[End], expected: End) -> float | str:
    errors = [end.error for end in ends if end.error]
    assert expected.error is None, expected.error
    return errors[0] if errors else max(largest(end.state, expected.state) for end in ends)


def table(catalogue: str) -> str:
    """Return the table of a catalogue in Markdown; rows that are equal share a line."""
    titles = TITLES[catalogue]
    columns = [found_on(catalogue, title) for title in titles]
    lines: dict[tuple[str, ...], list[str]] = {}
    for name in columns[0]:
        cells = tuple("refused" if isinstance(column[name], str) else "equal" for column in columns)
        lines.setdefault(cells, []).append(name)
    rows = [[", ".join(names), *cells] for cells, names in lines.items()]
    text = [[catalogue, *titles], ["---"] * (len(titles) + 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|" for line in text)


def main(names: list[str]) -> None:
    """Print the tables."""
    for name in names:
        print(f"{table(name)}\n\nMeasured with torch {torch.__version__.split('+')[0]} on the CPU.\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(ROWS)}; by default, all")
    main(parser.parse_args().names or list(ROWS))
