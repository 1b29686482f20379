"""`echelon ckpt` shows, checks, compares and exports checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import echelon
from echelon.trainer.checkpoint import save
from echelon.trainer.checkpoint.atomic_folder import commit_when_done
from echelon.trainer.cli.main import main


def make(path: Path, step: int = 0) -> Path:
    model = {"w": torch.zeros(3, 2), "b": torch.full((2,), float(step))}
    save(path, {"model": model, "trainer": {"step": step, "rng": np.arange(2000) + step}}, mesh={"dp_shard": 2})
    return path


def test_ls_lists_by_age_with_damage_and_unfinished_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("b.ckpt", "a.ckpt", "c.ckpt"):
        make(tmp_path / name)
    (tmp_path / "c.ckpt" / "manifest.json").write_text("{}")
    with commit_when_done(tmp_path / "d.ckpt"):
        assert main(["ckpt", "ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[:2]] == ["b.ckpt", "a.ckpt"]
    assert lines[2].startswith("damaged     c.ckpt: ")
    assert lines[3].startswith("unfinished  ")
    assert main(["ckpt", "ls", str(tmp_path / "a.ckpt")]) == 0
    assert "holds no checkpoints" in capsys.readouterr().out


class Falling(echelon.TrainModule):
    """Its validation loss is 3, 1, 2 in the first epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch).square().mean()
        return loss

    def validation_step(self, batch: torch.Tensor) -> None:
        self.log("loss/val", [3.0, 1.0, 2.0][self.current_epoch])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run_below(folder: Path) -> None:
    saves = echelon.ModelCheckpoint(monitor="loss/val", save_top_k=-1)
    data = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    echelon.Trainer(max_epochs=3, default_root_dir=folder, callbacks=saves, **quiet).fit(Falling(), data, data)


def test_ls_searches_below_and_shows_step_score_and_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_below(tmp_path)
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    parts = r"(step \d+) .* (loss/val \d)  .*/checkpoints/epoch=\d"
    shown = [(" * " in line, *re.findall(parts, line)) for line in lines]
    assert shown == [
        (False, ("step 2", "loss/val 3")),
        (True, ("step 4", "loss/val 1")),
        (False, ("step 6", "loss/val 2")),
    ]
    assert main(["ckpt", "ls", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["step"] for one in found["checkpoints"]] == [2, 4, 6]
    assert [one["is_best"] for one in found["checkpoints"]] == [False, True, False]
    assert found["checkpoints"][1]["scores"] == {"loss/val": 1.0} and found["unfinished"] == []
    assert (tmp_path / found["checkpoints"][0]["name"]).exists()


def test_show_is_short_unless_all_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_below(tmp_path)
    path = next(tmp_path.rglob("epoch=1*.ckpt"))
    assert main(["ckpt", "show", str(path)]) == 0
    short = capsys.readouterr().out
    assert len(short.splitlines()) < 25
    assert "model: 2 tensors with 3 elements (float32)" in short and "global_step 4" in short
    assert main(["ckpt", "show", str(path), "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 60


def test_show_tells_origin_files_tensors_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "show", "--all", str(make(tmp_path / "a.ckpt", 7))]) == 0
    shown = capsys.readouterr().out
    for text in (
        "dp_shard 2",
        f"torch {torch.__version__}",
        "model.safetensors",
        "w: float32 (3, 2)",
        "step: 7",
        "int64 (2000,)",
    ):
        assert text in shown


def test_verify_says_of_each_whether_it_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a.ckpt")
    assert main(["ckpt", "verify", str(tmp_path)]) == 0
    make(tmp_path / "b.ckpt")
    (tmp_path / "b.ckpt" / "state.json").unlink()
    assert main(["ckpt", "verify", str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["good", "good", "damaged"]
    assert "state.json is missing" in lines[2]


def test_diff_names_what_differs_and_by_how_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = make(tmp_path / "a.ckpt", 1), make(tmp_path / "b.ckpt", 3)
    assert main(["ckpt", "diff", str(first), str(first)]) == 0
    assert capsys.readouterr().out == "4 of 4 values are the same.\n"
    assert main(["ckpt", "diff", str(first), str(second)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("~ model.b: float32 (2,)")
    assert lines[0].endswith("by 2 at most")
    assert lines[1] == "~ trainer.step: 1 -> 3"
    assert lines[2].startswith("~ trainer.rng: int64 (2000,)")
    assert lines[3] == "1 of 4 values are the same."


def test_diff_names_what_only_one_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = make(tmp_path / "a.ckpt")
    save(tmp_path / "b.ckpt", {"model": {"w": torch.zeros(3, 2)}, "ema": {"w": torch.tensor(2.5)}})
    assert main(["ckpt", "diff", str(first), str(tmp_path / "b.ckpt")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "- model.b: float32 (2,)" in lines
    assert "+ ema.w: float32 () = 2.5" in lines


def test_export_writes_the_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "a.ckpt")
    assert main(["ckpt", "export", str(tmp_path / "a.ckpt"), str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "model.safetensors" in capsys.readouterr().out


def test_an_error_goes_to_stderr_with_its_own_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ckpt", "show", str(tmp_path / "absent")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_control_characters_in_names_are_shown_as_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[2J\x07\nb\x9b31m"
    path = tmp_path / f"{evil}.ckpt"
    save(path, {"model": {f"w{evil}": torch.zeros(2)}, f"more{evil}": {"value": evil}})
    shown_whole = ["show", "--all", path]
    for words in (["ls", tmp_path], shown_whole, ["verify", path], ["diff", path, path], ["export", path, path]):
        main(["ckpt", *map(str, words)])
        shown = capsys.readouterr()
        text = shown.out + shown.err
        assert [letter for letter in text if not letter.isprintable() and letter != "\n"] == []
        assert "a\nb" not in text
    assert main(["ckpt", "show", "--all", str(path)]) == 0
    assert r"a\x1b[2J\x07\nb\x9b31m" in capsys.readouterr().out
    assert main(["ckpt", "show", str(tmp_path / evil)]) == 2
    assert "\x1b" not in capsys.readouterr().err
