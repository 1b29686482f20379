"""benchmarks/pretrained.py runs, at a size too small to time, and counts what ranks keep."""

import json
from pathlib import Path

import pytest
from programs import run_program

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pretrained.py"


@pytest.mark.only_in_sweep  # tests/strategies/pretrained count what ranks keep of a folder
def test_ranks_keep_half_of_the_folder_and_little_beside(tmp_path):
    pytest.importorskip("transformers")
    done = run_program(SCRIPT, "--size-mb", "4", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    rows = {(row["layout"], row["way"]): row for row in found["rows"]}
    assert [layout for layout, way in rows if way == "load_pretrained"] == ["fsdp", "tp", "pp"]
    for row in rows.values():
        assert found["bytes"] * 0.45 < row["shard"] < found["bytes"] * 0.8
        assert row["seconds"] > 0 and row["of_reading"] > 0
    for layout in ("fsdp", "tp", "pp"):
        assert rows[layout, "load_pretrained"]["beside_shard"] < 256e6
