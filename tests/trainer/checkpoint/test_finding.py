"""`last` is the newest valid checkpoint; for a path that is not a checkpoint, an error says what it is."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from echelon import Engine
from echelon.common.errors import CheckpointError
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import (
    list_checkpoints,
    load,
    load_weights,
    newest_valid,
    point_link,
    remove_checkpoint,
    resolve_checkpoint,
    save,
    verify,
)
from echelon.trainer.checkpoint.atomic_folder import commit_when_done
from echelon.trainer.cli.checkpoint_contents import show_checkpoint, verify_all


def make(path: Path, value: float = 1.0) -> Path:
    save(path, {"model": {"w": torch.full((2,), value)}})
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


_HOOKED: list[bool] = []
ON_OPEN: dict[str, Callable[[], object]] = {}
"""What another process does once, just before a file of this name is opened."""


def _watch(event: str, args: tuple[object, ...]) -> None:
    if event == "open" and isinstance(args[0], str | Path) and ON_OPEN:
        act = ON_OPEN.pop(Path(args[0]).name, None)
        if act is not None:
            act()


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
@pytest.mark.parametrize("is_deleted", [True, False])
@pytest.mark.parametrize(
    "read",
    [
        verify,
        load_weights,
        lambda path: load(path, verify=False),
        lambda path: show_checkpoint(path) and load(path),
        lambda path: newest_valid(path.parent),
        lambda path: verify_all([path.parent])[1] or pytest.fail("an intact checkpoint is called damaged"),
    ],
    ids=["verify", "load_weights", "load", "show", "newest_valid", "verify_all"],
)
def test_a_reader_beside_a_run_that_saves_gets_one_whole_checkpoint(
    tmp_path: Path, read: Callable[[Path], Any], name: str, is_deleted: bool
) -> None:
    """While a checkpoint is read, last.ckpt and another name get the next one, and the one before is deleted."""
    if not _HOOKED:
        sys.addaudithook(_watch)
        _HOOKED.append(True)
    link, same = tmp_path / "run" / "last.ckpt", tmp_path / "same" / "a.ckpt"

    def save_step(step: int) -> None:
        state = {"model": {name: torch.full((2,), float(step)) for name in "ab"}}
        save(link.parent / f"{step}.ckpt", state)
        save(same, state)
        point_link(link, link.parent / f"{step}.ckpt")
        if step and is_deleted:
            remove_checkpoint(link.parent / f"{step - 1}.ckpt")

    save_step(0)
    for step, path in enumerate((link, same), 1):
        ON_OPEN[name] = partial(save_step, step)
        found = read(path)
        assert name not in ON_OPEN or name == "model.safetensors"
        ON_OPEN.clear()
        if isinstance(found, dict):
            model = found.get("model", found)
            assert model["a"].tolist() == model["b"].tolist()
        assert read(path)


def load_on_rank(folder: str) -> list[float]:
    """Load last.ckpt; before rank 1 reads it, rank 0 has, and it moves, and its checkpoint is deleted."""
    engine, has_read = Engine(strategy="ddp", accelerator="cpu"), Path(folder, "has_read")

    def move() -> None:
        deadline = time.monotonic() + 60
        while not has_read.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        point_link(link, make(Path(folder, "second.ckpt"), 2.0))
        remove_checkpoint(Path(folder, "first.ckpt"))

    link = Path(folder, "last.ckpt")
    sys.addaudithook(_watch)
    ON_OPEN.update({"state.json": has_read.touch} if engine.global_rank == 0 else {"manifest.json": move})
    loaded: list[float] = engine.load(link)["model"]["w"].tolist()
    return loaded


def test_all_ranks_load_one_checkpoint_though_the_link_to_it_moves_meanwhile(tmp_path: Path) -> None:
    point_link(tmp_path / "last.ckpt", make(tmp_path / "first.ckpt"))
    assert run_ranks(load_on_rank, 2, str(tmp_path), timeout=120) == [[2.0, 2.0], [2.0, 2.0]]


def test_links_and_unfinished_writes_are_no_checkpoints(tmp_path: Path) -> None:
    path = make(tmp_path / "a.ckpt")
    point_link(tmp_path / "last.ckpt", path)
    with commit_when_done(tmp_path / "b.ckpt") as folder:
        make(folder / "inner.ckpt")
        assert [found.path for found in list_checkpoints(tmp_path)] == [path]


def test_last_is_nothing_where_nothing_was_saved(tmp_path: Path) -> None:
    assert resolve_checkpoint("last", tmp_path) is None
    assert resolve_checkpoint("last", tmp_path / "absent") is None


def test_a_checkpoint_or_a_link_to_one_is_taken_as_given(tmp_path: Path) -> None:
    path = make(tmp_path / "a.ckpt")
    point_link(tmp_path / "last.ckpt", path)
    assert resolve_checkpoint(str(path)) == path
    assert resolve_checkpoint(tmp_path / "last.ckpt") == tmp_path / "last.ckpt"


def test_a_misspelt_path_is_told_what_is_there(tmp_path: Path) -> None:
    make(tmp_path / "epoch=1.ckpt")
    with pytest.raises(CheckpointError, match=r"epoch=11.ckpt' does not exist; .* has epoch=1.ckpt"):
        resolve_checkpoint(tmp_path / "epoch=11.ckpt")
    with pytest.raises(CheckpointError, match="Neither does"):
        resolve_checkpoint(tmp_path / "absent" / "a.ckpt")


def test_a_path_that_the_file_system_refuses_says_why(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be read: .*\(ENAMETOOLONG\).*; choose a shorter name"):
        resolve_checkpoint(tmp_path / ("a" * 300))


def test_a_file_is_sent_to_load_weights(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"is a file.*echelon.load_weights"):
        resolve_checkpoint(tmp_path / "a.ckpt")


def test_a_folder_of_checkpoints_lists_them(tmp_path: Path) -> None:
    make(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"folder of checkpoints; give one of them: a.ckpt"):
        resolve_checkpoint(tmp_path)


def test_a_foreign_folder_is_told_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match=r"no manifest.json \(found: notes.txt\)"):
        resolve_checkpoint(tmp_path)


def test_a_link_to_a_deleted_checkpoint_says_so(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    with pytest.raises(CheckpointError, match="a link to gone.ckpt, which no longer exists"):
        resolve_checkpoint(tmp_path / "last.ckpt")
