"""benchmarks/parameter_server.py runs, at a size that measures no time, and counts the bytes of the rows of a table."""

import re
from pathlib import Path

from programs import run_program

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "parameter_server.py"
NUMBER = r"([0-9.]+)"


def test_a_step_with_a_server_stands_beside_that_of_ddp_and_a_table_moves_the_rows_of_a_batch(tmp_path):
    done = run_program(SCRIPT, "--steps", "6", "--turns", "1", "--rows", "20000", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    *_, dense, table = done.stdout.splitlines()
    found = re.fullmatch(rf"MLP: ps {NUMBER} ms, ddp {NUMBER} ms, ratio {NUMBER}", dense)
    assert found and all(float(number) > 0 for number in found.groups())
    found = re.fullmatch(rf"table: {NUMBER} ms, {NUMBER} kB a step and trainer, {NUMBER} x its rows", table)
    assert found and 1.0 <= float(found[3]) <= 1.2
    assert list(tmp_path.iterdir()) == []
