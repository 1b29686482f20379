"""Write the tables of docs/equivalence.md: what each strategy trains, and its difference from one process.

Usage: python tests/equivalence/table.py [matrix] [unusual modules] [--lines TITLE ...], as root, since two nodes of the
matrix are two network namespaces; by default, both tables. With --lines, only these columns of the matrix are measured;
the others stay as the page has them.
"""

import argparse
import os
import re
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
os.environ["ECHELON_SWEEP"] = "1"  # all cases

from matrix import ALONE, CASES, LINES, compare, largest, run
from unusual_modules import LAYOUTS, MODULES, alone, ends_of

PAGE = Path(__file__).parents[2] / "docs" / "equivalence.md"


def main(names, titles):
    """Run what the tables compare, for the matrix perhaps only some lines, and write them to the page."""
    page = PAGE.read_text()
    for name in names:
        made = matrix(titles, columns_of(page)) if name == "matrix" else unusual_modules()
        table = made + f"\n\nMeasured with torch {torch.__version__.split('+')[0]} on the CPU."
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        page = re.sub(f"(?s){start}.*{end}", f"{start}\n{table}\n{end}", page)
    PAGE.write_text(page)


def columns_of(page):
    """Return the cells of each line of the matrix on the page, by its title, if the page has the cases of today."""
    table = page.partition("<!-- matrix -->\n")[2].partition("\n\n")[0]
    (_, *titles), _, *rows = ([cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines())
    if [row[0] for row in rows] != [case.title for case in CASES]:
        return {}
    return {title: [row[place] for row in rows] for place, title in enumerate(titles, start=1)}


def matrix(titles, known):
    """Return the table of the matrix; lines that are not in `titles`, if there are any, keep their `known` cells."""
    lines = LINES[1:]
    kept = {title: cells for title, cells in known.items() if titles and title not in titles}
    networks = {line.network for line in lines if line.title not in kept}
    expected = {network: run(line, line.cases) for network, line in ALONE.items() if network in networks}
    columns = [kept.get(line.title) or column(run(line, line.cases), expected[line.network]) for line in lines]
    rows = [[case.title, *row] for case, *row in zip(CASES, *columns, strict=True)]
    return table_of("case", [line.title for line in lines], rows)


def unusual_modules():
    """Return the table of unusual modules."""
    ends = {processes: ends_of(processes) for processes in sorted({layout.processes for layout in LAYOUTS})}
    rows = [[kind, *(unusual_cell(layout, kind, ends[layout.processes]) for layout in LAYOUTS)] for kind in MODULES]
    return table_of("module", [layout.title for layout in LAYOUTS], rows)


def unusual_cell(layout, kind, ends):
    """Return the text of a cell of the table of unusual modules."""
    if kind in layout.leaves_out:
        return "-"
    of_ranks = [end[layout.title, kind] for end in ends]
    if any(end.error for end in of_ranks):
        return "refused"
    return number(max(largest(end.state, alone(layout.global_batch, kind).state) for end in of_ranks))


def column(ends, expected):
    """Return the cells of a line of the matrix."""
    return [cell(ends.get(case), expected[case][0] if case in ends else None) for case in CASES]


def cell(ends, expected):
    """Return the text of a cell of the matrix; a dash if the line does not have the case."""
    return "-" if ends is None else number(max(compare(end, expected).state for end in ends))


def number(value):
    """Return a difference with one digit."""
    return f"{value:.0e}".replace("0e+00", "0")


def table_of(first, titles, rows):
    """Return a table in Markdown."""
    lines = [[first, *titles], ["---"] * (len(titles) + 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|" for line in lines)


TABLES = ("matrix", "unusual modules")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"any of {', '.join(TABLES)}; by default, all")
    parser.add_argument("--lines", nargs="+", choices=[line.title for line in LINES[1:]], metavar="TITLE", default=())
    options = parser.parse_args()
    main(options.names or TABLES, options.lines)
