"""The notebook of the documentation runs from top to bottom, and prints what stands below its cells.

Its cells run as a program whose classes are of ``__main__``, as those of a kernel's are. Jupyter adds nothing to that
but its console, which tests/callbacks/test_progress.py looks at, and 86 MB of packages.
"""

import json
from pathlib import Path

import pytest
from programs import run_program

NOTEBOOK = Path(__file__).parents[2] / "docs" / "one_to_many.ipynb"


@pytest.mark.only_in_sweep  # examples/digits.py runs elsewhere
def test_the_notebook_prints_what_stands_below_its_cells(tmp_path):
    content = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    program = [f"{''.join(cell['source'])}\nprint('end of cell {number}')\n" for number, cell in enumerate(cells)]
    done = run_program("-W", "error", "-c", "".join(program), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    shown, rest = [], done.stdout
    for number in range(len(cells)):
        one, _, rest = rest.partition(f"end of cell {number}\n")
        shown.append(one)
    stored = ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in cells]
    assert [one for one in stored if one] == [one for one, text in zip(shown, stored, strict=True) if text]
    assert sum("to 12 digits: True" in one for one in stored) == 2
    assert "was killed by SIGKILL" in done.stderr


def test_the_notebook_is_one():
    content = json.loads(NOTEBOOK.read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    assert NOTEBOOK.stat().st_size < 10_000
