"""A checkpoint exists whole or not at all, whatever the disk, other runs and signals do."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_program
from sweep import IS_SWEEP

from echelon.common.errors import CheckpointError
from echelon.trainer.checkpoint import load, newest_valid, point_link, remove_checkpoint, save, verify
from echelon.trainer.checkpoint.atomic_folder import commit_when_done, delete_abandoned, list_unfinished
from echelon.trainer.checkpoint.manifest import MANIFEST
from echelon.trainer.checkpoint.single_file import SingleFile


def state(step: int = 0, size: int = 100) -> dict[str, Any]:
    return {"model": {"w": torch.full((size,), float(step))}, "trainer": {"step": step}}


MORE_KILLS = [("fresh", 30), ("rank-1", 4), ("node-1", 15), ("replace-node-0", 25)]
MORE_KILLS += [("replace-without-exchange-file", 30)]
"""What other kills show together: a rank 0 saves afresh, and the ranks of nodes and files replace."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("mode", "at_least"),
    [
        ("replace", 30),
        ("replace-without-exchange", 30),
        ("remove", 40),
        ("random", 40),
        ("rank-0", 20),
        ("node-0", 20),
        ("replace-node-1", 25),
        ("replace-file", 30),
        *(MORE_KILLS if IS_SWEEP else ()),
        ("rank-0-file", 40),
    ],
)
def test_a_kill_anywhere_leaves_every_earlier_checkpoint_valid(mode: str, at_least: int, memory_path: Path) -> None:
    script = Path(__file__).with_name("killed_everywhere.py")
    every = "1" if IS_SWEEP else "5" if "node" in mode or "rank" in mode else "3"
    done = run_program(script, memory_path / "run", mode, every, folder=memory_path, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= at_least // int(every)


def test_missing_folders_are_made(tmp_path: Path) -> None:
    save(tmp_path / "a" / "b" / "c.ckpt", state())
    verify(tmp_path / "a" / "b" / "c.ckpt")


def test_a_checkpoint_is_replaced_by_one_of_the_same_name(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / "a.ckpt", state(step))
    assert load(tmp_path / "a.ckpt")["trainer"]["step"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_a_link_is_replaced_by_a_checkpoint_and_its_target_stays(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", state(1))
    point_link(tmp_path / "last.ckpt", tmp_path / "a.ckpt")
    save(tmp_path / "last.ckpt", state(2))
    assert not (tmp_path / "last.ckpt").is_symlink()
    assert load(tmp_path / "last.ckpt")["trainer"]["step"] == 2
    assert load(tmp_path / "a.ckpt")["trainer"]["step"] == 1
    assert {path.name for path in tmp_path.iterdir()} == {"a.ckpt", "last.ckpt"}


@pytest.mark.parametrize("kind", ["file", "folder", "empty folder"])
def test_what_is_no_checkpoint_is_neither_overwritten_nor_removed(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    if kind == "file":
        target.write_text("precious")
    else:
        target.mkdir()
        if kind == "folder":
            (target / "precious").write_text("precious")
    with pytest.raises(CheckpointError, match="is not a checkpoint, so it is not overwritten"):
        save(target, state())
    with pytest.raises(CheckpointError, match="so it is not deleted"):
        remove_checkpoint(target)
    save(tmp_path / "a.ckpt", state())
    with pytest.raises(CheckpointError, match="is not a checkpoint, so it is not overwritten"):
        point_link(target, tmp_path / "a.ckpt")
    assert target.exists()


def test_a_damaged_checkpoint_may_be_overwritten(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", state(1))
    (tmp_path / "a.ckpt" / MANIFEST).write_text("{")
    save(tmp_path / "a.ckpt", state(2))
    assert load(tmp_path / "a.ckpt")["trainer"]["step"] == 2


def test_a_link_points_relatively_so_that_the_folder_can_move(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for step in (1, 2):
        save(folder / f"{step}.ckpt", state(step))
        point_link(folder / "last.ckpt", folder / f"{step}.ckpt")
    assert os.readlink(folder / "last.ckpt") == "2.ckpt"
    folder.rename(tmp_path / "moved")
    assert load(tmp_path / "moved" / "last.ckpt")["trainer"]["step"] == 2


def test_a_link_to_a_link_points_to_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", state(1))
    point_link(tmp_path / "last.ckpt", tmp_path / "a.ckpt")
    point_link(tmp_path / "best.ckpt", tmp_path / "last.ckpt")
    assert os.readlink(tmp_path / "best.ckpt") == "a.ckpt"


def test_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint; save it first"):
        point_link(tmp_path / "last.ckpt", tmp_path / "a.ckpt")
    assert not os.path.lexists(tmp_path / "last.ckpt")


def test_removing_a_link_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", state())
    point_link(tmp_path / "last.ckpt", tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="so it is not deleted"):
        remove_checkpoint(tmp_path / "last.ckpt")
    verify(tmp_path / "a.ckpt")


def test_removing_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "a.ckpt", state())
    save(tmp_path / "b.ckpt", state())
    assert remove_checkpoint(tmp_path / "a.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["b.ckpt"]


def test_the_newest_valid_checkpoint_is_not_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.ckpt", "b.ckpt", "c.ckpt", "d.ckpt"):
        save(tmp_path / name, state())
    (tmp_path / "d.ckpt" / MANIFEST).write_text("{")
    (tmp_path / "c.ckpt" / "model.safetensors").unlink()
    assert not remove_checkpoint(tmp_path / "b.ckpt")
    assert "b.ckpt is the newest valid checkpoint" in caplog.text
    assert all(remove_checkpoint(tmp_path / name) for name in ("a.ckpt", "c.ckpt", "d.ckpt"))
    assert newest_valid(tmp_path) == tmp_path / "b.ckpt"


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with commit_when_done(tmp_path / "a.ckpt") as folder:
            (folder / "x").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("single_file", [None, SingleFile()], ids=["folder", "file"])
@pytest.mark.parametrize("limit", [0, 1, 300, 1000, 200_000])
def test_a_disk_that_refuses_at_any_byte_leaves_the_earlier_checkpoint(
    limit: int, single_file: SingleFile | None, tmp_path: Path
) -> None:
    save(tmp_path / "a.ckpt", state(1, 100_000), single_file=single_file)
    with (
        file_size_limit(limit),
        pytest.raises(CheckpointError, match=r"File too large \(EFBIG\).*Earlier.*untouched") as info,
    ):
        save(tmp_path / "a.ckpt", state(2, 100_000), single_file=single_file)
    assert str(tmp_path / "a.ckpt") in str(info.value)
    assert load(tmp_path / "a.ckpt")["trainer"]["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "echelon-test", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a disk of 1 MB cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_leaves_the_earlier_checkpoint_and_says_so(small_disk: Path) -> None:
    save(small_disk / "a.ckpt", state(1, 100_000))
    with pytest.raises(CheckpointError, match=r"No space left on device \(ENOSPC\).*; free some space"):
        save(small_disk / "b.ckpt", state(2, 200_000))
    assert newest_valid(small_disk) == small_disk / "a.ckpt"
    assert [path.name for path in small_disk.iterdir()] == ["a.ckpt"]
    save(small_disk / "b.ckpt", state(2, 1000))


@contextmanager
def unprivileged(folder: Path) -> Iterator[None]:
    """Forbid writing to `folder`, to root as well."""
    mode, user = folder.stat().st_mode, os.geteuid()
    folder.chmod(0o555)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(0)
        folder.chmod(mode)


def test_a_read_only_folder_is_named_with_the_remedy() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        save(folder / "a.ckpt", state(1))
        save(folder / "b.ckpt", state(2))
        with unprivileged(folder):
            for action in (
                lambda: save(folder / "c.ckpt", state()),
                lambda: remove_checkpoint(folder / "a.ckpt"),
                lambda: point_link(folder / "last.ckpt", folder / "a.ckpt"),
            ):
                with pytest.raises(CheckpointError, match=r"Permission denied \(EACCES\).*that you may write"):
                    action()
        assert load(folder / "a.ckpt")["trainer"]["step"] == 1
        assert {path.name for path in folder.iterdir()} == {"a.ckpt", "b.ckpt"}


def test_the_folder_of_a_writer_that_lives_is_left_alone(tmp_path: Path) -> None:
    with commit_when_done(tmp_path / "a.ckpt") as other:
        (other / "half").write_text("written")
        save(tmp_path / "b.ckpt", state(1))
        delete_abandoned(tmp_path)
        assert (other / "half").read_text() == "written"
        shutil.copytree(tmp_path / "b.ckpt", other, dirs_exist_ok=True)
    verify(tmp_path / "a.ckpt")


def leftover(folder: Path, *, host: str | None = None) -> Path:
    """Make the folder of a writer that is dead, on this or on another machine."""
    with commit_when_done(folder / "left.ckpt") as own:
        parts = own.name.split(".")
        (own / "x").write_text("")
    shutil.rmtree(folder / "left.ckpt")
    code = [sys.executable, "-c", "import os; print(os.getpid())"]
    parts[-3] = subprocess.run(code, capture_output=True, text=True, check=True).stdout.strip()
    parts[-4] = host or parts[-4]
    made = folder / ".".join(parts)
    made.mkdir()
    (made / "half").write_text("written")
    return made


def test_what_a_dead_writer_left_is_cleared_away_by_the_next_save(tmp_path: Path) -> None:
    left = leftover(tmp_path)
    assert list_unfinished(tmp_path) == [left]
    save(tmp_path / "b.ckpt", state())
    assert list_unfinished(tmp_path) == []


def test_what_a_writer_of_another_machine_left_stays_for_a_day(tmp_path: Path) -> None:
    left = leftover(tmp_path, host="elsewhere-00000000")
    save(tmp_path / "b.ckpt", state())
    assert list_unfinished(tmp_path) == [left]
    yesterday = time.time() - 25 * 3600
    os.utime(left, (yesterday, yesterday))
    save(tmp_path / "b.ckpt", state())
    assert list_unfinished(tmp_path) == [left]
    os.utime(left / "half", (yesterday, yesterday))
    save(tmp_path / "b.ckpt", state())
    assert list_unfinished(tmp_path) == []


def test_two_runs_in_one_folder_write_and_prune_without_harm(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def run(name: str) -> None:
        try:
            for step in range(15):
                save(tmp_path / f"{name}-{step}.ckpt", state(step))
                save(tmp_path / "both.ckpt", state(step))
                point_link(tmp_path / "last.ckpt", tmp_path / f"{name}-{step}.ckpt")
                if step:
                    remove_checkpoint(tmp_path / f"{name}-{step - 1}.ckpt")
        except BaseException as error:  # noqa: BLE001 - asserted below
            errors.append(error)

    runs = [threading.Thread(target=run, args=(name,)) for name in "xy"]
    for thread in runs:
        thread.start()
    for thread in runs:
        thread.join()
    assert errors == []
    names = {"x-14.ckpt", "y-14.ckpt", "both.ckpt", "last.ckpt"}
    assert {path.name for path in tmp_path.iterdir()} == names
    for name in names:
        verify(tmp_path / name)
