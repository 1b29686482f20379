"""Write the tables of docs/libraries.md: what each layout trains of the catalogues.

Usage: python tests/libraries/catalogue.py [optimizers] [pytorch_optimizer] [modules], where the libraries are.
"""

import argparse
import functools
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "equivalence"))
sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from catalogue_modules import modules
from catalogue_optimizers import optimizers, pytorch_optimizers
from matrix import largest
from unusual_modules import LAYOUTS, End, Layout, train, train_all

from echelon.testing import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "libraries.md"
ROWS: Mapping[str, Callable[[], Mapping[str, Callable[[], Any]]]] = {
    "optimizers": optimizers,
    "pytorch_optimizer": pytorch_optimizers,
    "modules": modules,
}
TITLES = {
    "optimizers": [layout.title for layout in LAYOUTS if layout.processes < 4],
    "pytorch_optimizer": [layout.title for layout in LAYOUTS if layout.processes < 4],
    "modules": [layout.title for layout in LAYOUTS if layout.processes < 4 and not layout.title.startswith("pp")],
}
"""The layouts of each table. A pipeline may fail on one stage alone, after which nothing else can run there."""
BOUND = {
    "transformers: output_attentions": 1e-5,
    "lorarite": 1e-9,  # its inverse roots of matrices magnify rounding
    **dict.fromkeys(("adago", "adamuon", "muon", "muonclip", "normuon", "scion", "scionlight"), 1e-3),
}
"""The largest difference of what computes a part in float32, or in bfloat16."""


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


def cell(name: str, found: float | str) -> str:
    """Return what a table says of a row on a layout."""
    if isinstance(found, str):
        remedies = "echelon.common.errors.", "use strategy=", "Trainer(activation_checkpointing="
        is_named = any(remedy in found for remedy in remedies)
        return "refused" if is_named else f"ends in an error without a name: {found[-600:]}"
    return "equal" if found <= BOUND.get(name, 1e-10) else "differs"


def table(catalogue: str) -> str:
    """Return the table of a catalogue in Markdown; rows that are equal share a line."""
    titles = TITLES[catalogue]
    columns = [found_on(catalogue, title) for title in titles]
    lines: dict[tuple[str, ...], list[str]] = {}
    for name in columns[0]:
        cells = tuple(cell(name, column[name]) for column in columns)
        lines.setdefault(cells, []).append(name)
    rows = [[", ".join(names), *cells] for cells, names in lines.items()]
    text = [[catalogue, *titles], ["---"] * (len(titles) + 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|" for line in text)


def documented(catalogue: str) -> dict[tuple[str, str], str]:
    """Return the cells of a table of the page, by row and layout."""
    text = re.search(f"(?s)<!-- {catalogue} -->\n(.*?)\n\n", PAGE.read_text())
    assert text is not None
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.group(1).splitlines()]
    return {
        (name, title): cell
        for names, *cells in rows
        for name in names.split(", ")
        for title, cell in zip(head[1:], cells, strict=True)
    }


def main(names: list[str]) -> None:
    """Write the tables to the page."""
    page = PAGE.read_text()
    for name in names:
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        measured = f"{table(name)}\n\nMeasured with torch {torch.__version__.split('+')[0]} on the CPU."
        page = re.sub(f"(?s){start}.*{end}", lambda _, text=f"{start}\n{measured}\n{end}": text, page)
    PAGE.write_text(page)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(ROWS)}; by default, all")
    main(parser.parse_args().names or list(ROWS))
