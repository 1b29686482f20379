"""docs/checkpoint-format.md is accurate, and its code runs."""

from __future__ import annotations

import hashlib
import re
import runpy
from itertools import chain
from pathlib import Path

import pytest
import torch
from small import Regression, loader, quiet
from torch import nn

from echelon.trainer.checkpoint import encoding, load, load_weights, point_link, save, tags
from echelon.trainer.checkpoint.manifest import read_manifest
from echelon.trainer.checkpoint.single_file import SingleFile

PAGE = Path(__file__).parents[3] / "docs" / "checkpoint-format.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    module = nn.Linear(3, 2)
    state = {"model": module.state_dict(), "optimizers": [{"m": torch.ones(3)}], "trainer": {"global_step": 400}}
    save(tmp_path / "a.ckpt", state)
    point_link(tmp_path / "last.ckpt", tmp_path / "a.ckpt")
    save(tmp_path / "one.ckpt", state, single_file=SingleFile())
    return tmp_path


def test_the_code_on_the_page_reads_a_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snippets = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (registering,) = [code for code in snippets if "register_tensor_class" in code]
    (omitting,) = [code for code in snippets if "OmitFrozenWeights" in code]
    readers = [code for code in snippets if code not in (registering, omitting)]
    assert len(readers) == 3
    monkeypatch.chdir(folder)
    for code in readers:
        (folder / "snippet.py").write_text(code)
        names = runpy.run_path(str(folder / "snippet.py"))
        weights, state = names["weights"], names["state"]
        assert isinstance(weights, dict)
        assert isinstance(state, dict)
        nn.Linear(3, 2).load_state_dict(weights)
        assert state["trainer"]["global_step"] == 400
    (folder / "omit.py").write_text(omitting)
    runpy.run_path(str(folder / "omit.py"))
    assert sorted(load(folder / "runs/adapted/last.ckpt")["omitted_weights"]) == ["base.bias", "base.weight"]
    exec(registering, names)  # noqa: S102 - the page's own text
    scaled = names["Scaled"](torch.ones(4, 2, dtype=torch.int8), torch.rand(4, 1))
    save(folder / "scaled.ckpt", {"model": {"w": scaled}})
    assert torch.equal(load_weights(folder / "scaled.ckpt")["w"].scale, scaled.scale)
    nn.Linear(3, 2).load_state_dict(torch.load("model.pt", weights_only=True))
    with pytest.raises(IsADirectoryError):
        torch.load("last.ckpt", weights_only=True)


def test_the_manifest_hash_is_computed_as_the_page_says(folder: Path) -> None:
    raw = (folder / "last.ckpt" / "manifest.json").read_bytes()
    (tail,) = re.findall(r"before the (\d+) last ones", PAGE.read_text())
    head, end = raw[: -int(tail)], raw[-int(tail) :]
    assert end == b',\n "sha256": "' + hashlib.sha256(head).hexdigest().encode() + b'"\n}\n'


def test_the_page_lists_every_tag() -> None:
    texts = [Path(str(module.__file__)).read_text() for module in (encoding, tags)]
    found = {tag for text in texts for tag in re.findall(r'"(\$[a-z]+)"', text)}
    assert found == set(re.findall(r'\{"(\$[a-z]+)"', PAGE.read_text()))


@pytest.mark.parametrize("weights_only", [False, True])
def test_the_page_lists_every_part_of_a_run(tmp_path: Path, weights_only: bool) -> None:
    rows = PAGE.read_text().partition("## The parts of a run\n")[2].partition("\n## ")[0].splitlines()
    parts = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in rows if row.startswith("| `")]
    trainer = quiet(tmp_path, max_epochs=1)
    trainer.fit(Regression(), loader())
    trainer.save_checkpoint(tmp_path / "whole.ckpt", weights_only=weights_only)
    saved = read_manifest(tmp_path / "whole.ckpt").parts
    assert sorted(saved) == sorted(chain(*parts[: 2 if weights_only else None]))


def test_the_data_begins_at_a_multiple_of_64(folder: Path) -> None:
    for file in (folder / "a.ckpt").glob("*.safetensors"):
        assert (8 + int.from_bytes(file.read_bytes()[:8], "little")) % 64 == 0
