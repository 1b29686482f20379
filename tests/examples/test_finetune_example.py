"""examples/finetune.py trains adapters of a folder, which lower the perplexity and are read back merged."""

import re
from pathlib import Path

import pytest
from programs import run_program

SCRIPT = Path(__file__).parents[2] / "examples" / "finetune.py"


@pytest.mark.only_in_sweep
def test_adapters_lower_the_perplexity_and_the_merged_model_has_it(tmp_path):
    pytest.importorskip("peft")
    done = run_program("-W", "error", SCRIPT, "--model", "tiny", "--steps", "10", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = map(float, re.search(r"docstrings: ([\d.]+) before, ([\d.]+) after", done.stdout).groups())
    [merged] = re.findall(r"as read back: ([\d.]+)", done.stdout)
    assert after < before < 2 * 384  # a guess is one of 384 tokens
    assert float(merged) == pytest.approx(after, rel=1e-3)
    folder = tmp_path / "finetune"
    written = {path.name for path in (folder / "adapter" / "step=10").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} == {name for name in written if "token" not in name}
    assert re.findall(r"(Before|After): +'Return the number of", done.stdout) == ["Before", "After"]
