"""`last` is the newest valid checkpoint; for a path that is not a checkpoint, an error says what it is."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from echelon.strategies.errors import CheckpointError
from echelon.trainer.checkpoint import list_checkpoints, newest_valid, point, resolve, save
from echelon.trainer.checkpoint.atomic_folder import committed


def make(path: Path) -> Path:
    save(path, {"model": {"w": torch.ones(2)}})
    return path


def test_the_newest_is_the_one_saved_last_whatever_its_name_and_times(tmp_path: Path) -> None:
    first, second = make(tmp_path / "z.ckpt"), make(tmp_path / "a.ckpt")
    os.utime(first, (2e9, 2e9))
    assert newest_valid(tmp_path) == second
    assert [found.path for found in list_checkpoints(tmp_path)] == [first, second]


def test_the_newest_of_several_folders_is_found(tmp_path: Path) -> None:
    make(tmp_path / "run0" / "a.ckpt")
    newest = make(tmp_path / "run1" / "a.ckpt")
    assert newest_valid(tmp_path / "run1", tmp_path / "run0", tmp_path / "run2") == newest


def test_a_healthy_folder_is_read_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path / "a.ckpt")
    with caplog.at_level(logging.INFO, "echelon"):
        newest_valid(tmp_path)
    assert caplog.records == []


def test_every_damaged_one_passed_over_is_reported_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["a.ckpt", "b.ckpt", "c.ckpt", "d.ckpt"]
    a, b, c, d = (make(tmp_path / name) for name in names)
    (b / "state.json").unlink()
    (c / "manifest.json").unlink()
    os.truncate(d / "model.safetensors", 10)
    assert newest_valid(tmp_path) == a
    said = {
        Path(record.args[0]).name: str(record.args[1]) for record in caplog.records if isinstance(record.args, tuple)
    }
    assert set(said) == {"b.ckpt", "c.ckpt", "d.ckpt"}
    assert "state.json is missing" in said["b.ckpt"]
    assert "manifest.json is missing" in said["c.ckpt"]
    assert "model.safetensors has 10 bytes, not" in said["d.ckpt"]


def test_links_and_unfinished_writes_are_no_checkpoints(tmp_path: Path) -> None:
    path = make(tmp_path / "a.ckpt")
    point(tmp_path / "last.ckpt", path)
    with committed(tmp_path / "b.ckpt") as folder:
        make(folder / "inner.ckpt")
        assert [found.path for found in list_checkpoints(tmp_path)] == [path]


def test_last_is_nothing_where_nothing_was_saved(tmp_path: Path) -> None:
    assert resolve("last", tmp_path) is None
    assert resolve("last", tmp_path / "absent") is None


def test_a_checkpoint_or_a_link_to_one_is_taken_as_given(tmp_path: Path) -> None:
    path = make(tmp_path / "a.ckpt")
    point(tmp_path / "last.ckpt", path)
    assert resolve(str(path)) == path
    assert resolve(tmp_path / "last.ckpt") == tmp_path / "last.ckpt"


def test_a_misspelt_path_is_told_what_is_there(tmp_path: Path) -> None:
    make(tmp_path / "epoch=1.ckpt")
    with pytest.raises(CheckpointError, match=r"epoch=11.ckpt' does not exist; .* has epoch=1.ckpt"):
        resolve(tmp_path / "epoch=11.ckpt")
    with pytest.raises(CheckpointError, match="Neither does"):
        resolve(tmp_path / "absent" / "a.ckpt")


def test_a_path_that_the_file_system_refuses_says_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read: .*\(ENAMETOOLONG\).*; choose a shorter name"):
        resolve(tmp_path / ("a" * 300))


def test_a_file_is_sent_to_load_weights(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"is a file.*echelon.load_weights"):
        resolve(tmp_path / "a.ckpt")


def test_a_folder_of_checkpoints_lists_them(tmp_path: Path) -> None:
    make(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"folder of checkpoints; give one of them: a.ckpt"):
        resolve(tmp_path)


def test_a_foreign_folder_is_told_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"no manifest.json \(found: notes.txt\)"):
        resolve(tmp_path)


def test_a_link_to_a_deleted_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    with pytest.raises(CheckpointError, match="a link to gone.ckpt, which no longer exists"):
        resolve(tmp_path / "last.ckpt")
