"""An asynchronous writer saves the state at the time of the call, in order, and hides no failure."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_program

from echelon.common.errors import CheckpointError
from echelon.trainer.checkpoint import AsyncWriter, Writer, load, save, verify
from echelon.trainer.checkpoint.files import HashedFile


def state(step: int, size: int = 100) -> dict[str, Any]:
    return {
        "model": {"w": torch.full((size,), float(step))},
        "optimizers": [{"m": torch.full((size,), float(step))}],
        "trainer": {"step": step, "list": [step]},
    }


@pytest.fixture(params=[Writer, AsyncWriter])
def writer(request: pytest.FixtureRequest) -> Writer:
    made: Writer = request.param()
    return made


def test_what_is_saved_is_what_was_there_when_save_was_called(writer: Writer, tmp_path: Path) -> None:
    live = state(1, 1_000_000)
    for step in (1, 2, 3):
        for tensor in (live["model"]["w"], live["optimizers"][0]["m"]):
            tensor.fill_(step)
        live["trainer"]["step"] = step
        writer.save(tmp_path / f"{step}.ckpt", live)
        live["model"]["w"].fill_(-1)
        live["optimizers"][0]["m"].fill_(-1)
        live["trainer"]["step"] = -1
    writer.close()
    for step in (1, 2, 3):
        loaded = load(tmp_path / f"{step}.ckpt")
        assert (loaded["model"]["w"] == step).all()
        assert (loaded["optimizers"][0]["m"] == step).all()
        assert loaded["trainer"]["step"] == step


def test_what_is_still_may_change_once_it_is_copied(writer: Writer, tmp_path: Path) -> None:
    live = state(1, 1_000_000)
    writer.save(tmp_path / "a.ckpt", live, still=("optimizers",))
    live["model"]["w"].fill_(-1)
    writer.wait_for_copy()
    live["optimizers"][0]["m"].fill_(-1)
    writer.close()
    loaded = load(tmp_path / "a.ckpt")
    assert (loaded["model"]["w"] == 1).all()
    assert (loaded["optimizers"][0]["m"] == 1).all()


def test_links_and_removals_follow_the_save_before_them(writer: Writer, tmp_path: Path) -> None:
    for step in range(5):
        writer.save(tmp_path / f"{step}.ckpt", state(step))
        writer.point(tmp_path / "last.ckpt", tmp_path / f"{step}.ckpt")
        if step > 1:
            writer.remove(tmp_path / f"{step - 2}.ckpt")
    writer.close()
    assert {path.name for path in tmp_path.iterdir()} == {"3.ckpt", "4.ckpt", "last.ckpt"}
    assert load(tmp_path / "last.ckpt")["trainer"]["step"] == 4


def test_a_state_that_changes_its_shapes_is_saved(tmp_path: Path) -> None:
    writer = AsyncWriter()
    for step, size in enumerate((10, 1000, 10)):
        writer.save(tmp_path / f"{step}.ckpt", {**state(step, size), f"extra{step}": torch.ones(step)})
    writer.close()
    for step, size in enumerate((10, 1000, 10)):
        loaded = load(tmp_path / f"{step}.ckpt")
        assert loaded["model"]["w"].shape == (size,)
        assert set(loaded) == {"model", "optimizers", "trainer", f"extra{step}"}


def test_a_value_that_cannot_be_saved_is_refused_at_once(writer: Writer, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\['bad'\]"):
        writer.save(tmp_path / "a.ckpt", {"bad": object()})
    writer.save(tmp_path / "b.ckpt", state(1))
    writer.close()
    verify(tmp_path / "b.ckpt")


@pytest.mark.parametrize("method", ["raise_if_failed", "close", "save"])
def test_a_failed_write_is_raised_by_whatever_is_called_next_on_all_ranks(method: str, tmp_path: Path) -> None:
    save(tmp_path / "old.ckpt", state(0))
    (tmp_path / "taken.ckpt").write_text("a file in the way")
    writer = AsyncWriter()
    writer.save(tmp_path / "taken.ckpt", state(1))
    for thread in threading.enumerate():
        if thread.name == "echelon-checkpoint":
            thread.join()
    writer.point(tmp_path / "last.ckpt", tmp_path / "old.ckpt")  # these two are called on rank 0 alone
    writer.remove(tmp_path / "old.ckpt")
    arguments = (tmp_path / "b.ckpt", state(2)) if method == "save" else ()
    with pytest.raises(CheckpointError, match=r"taken.ckpt exists and is not a checkpoint"):
        getattr(writer, method)(*arguments)
    assert {path.name for path in tmp_path.iterdir()} == {"old.ckpt", "taken.ckpt"}
    writer.raise_if_failed()
    writer.save(tmp_path / "c.ckpt", state(3))
    writer.close()
    verify(tmp_path / "c.ckpt")


def test_a_link_or_a_removal_that_is_not_possible_is_logged_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = AsyncWriter()
    writer.point(tmp_path / "last.ckpt", tmp_path / "gone.ckpt")
    writer.remove(tmp_path / "gone.ckpt")
    writer.close()  # rank 0 alone would raise here, after the last step
    assert "gone.ckpt, which is not a checkpoint; save it first. Training continues." in caplog.text
    left_alone = "gone.ckpt is not a checkpoint, so it is not deleted; delete it by hand. Training continues."
    assert left_alone in caplog.text


def follow_up(writer: AsyncWriter, folder: Path) -> None:
    """Any of these calls may be the one that finds the failure."""
    writer.point(folder / "last.ckpt", folder / "new.ckpt")
    writer.remove(folder / "old.ckpt")
    writer.close()


def test_nothing_that_follows_a_failed_write_happens(tmp_path: Path) -> None:
    save(tmp_path / "old.ckpt", state(0))
    writer = AsyncWriter()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))
    try:
        writer.save(tmp_path / "new.ckpt", state(1, 1_000_000))
        with pytest.raises(CheckpointError, match=r"new.ckpt could not be written: File too large \(EFBIG\)"):
            follow_up(writer, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["old.ckpt"]
    verify(tmp_path / "old.ckpt")


def test_buffers_are_reused_and_one_write_is_in_flight(tmp_path: Path) -> None:
    writer = AsyncWriter()
    places = set()
    for step in range(4):
        writer.save(tmp_path / f"{step}.ckpt", state(step, 300_000))
        assert sum(thread.name == "echelon-checkpoint" for thread in threading.enumerate()) <= 1
        if step:
            verify(tmp_path / f"{step - 1}.ckpt")
        places.add(tuple(buffer.data_ptr() for buffer in writer._buffers.values()))
    writer.close()
    assert len(places) == 1


def test_a_program_that_ends_without_closing_still_commits(tmp_path: Path) -> None:
    code = f"""
import torch
from pathlib import Path
from echelon.trainer.checkpoint import AsyncWriter
AsyncWriter().save(Path({str(tmp_path / "a.ckpt")!r}), {{"model": {{"w": torch.ones(3_000_000)}}}})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=480, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert load(tmp_path / "a.ckpt")["model"]["w"].sum() == 3_000_000


@pytest.mark.gpu
def test_tensors_of_a_device_are_saved_as_they_were(tmp_path: Path) -> None:
    writer = AsyncWriter()
    live = {
        "model": {"w": torch.ones(10_000_000, device="cuda")},
        "optimizers": {"m": torch.ones(10_000_000, device="cuda")},
    }
    for step in range(3):
        live["model"]["w"].fill_(step)
        live["optimizers"]["m"].fill_(step)
        writer.save(tmp_path / f"{step}.ckpt", live, still=("optimizers",))
        live["model"]["w"].fill_(-1)
        writer.wait_for_copy()
        live["optimizers"]["m"].fill_(-1)
    writer.close()
    for step in range(3):
        loaded = load(tmp_path / f"{step}.ckpt")
        assert (loaded["model"]["w"] == step).all()
        assert (loaded["optimizers"]["m"] == step).all()


WITHOUT_THREADS = """
import sys, threading
import torch
from echelon import Callback, ModelCheckpoint, Trainer, TrainModule
from echelon.trainer.checkpoint import load, verify
from torch.utils.data import DataLoader

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(100, 100)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

class NoThreads(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        # no memory for a stack of this size: what a limit on processes does to other users than root
        threading.stack_size(1 << 46 if trainer.global_step in (1, 2) else 0)

saving = ModelCheckpoint("saved", every_n_train_steps=1, save_top_k=-1, monitor="step", mode="max", save_last=True)
quiet = dict(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False)
trainer = Trainer(max_steps=4, callbacks=[NoThreads(), saving], **quiet)
trainer.fit(Net(), DataLoader(torch.ones(8, 100), batch_size=2))
for path in saving.kept_paths:
    threading.stack_size(1 << 46)
    verify(path)
    print(load(path)["loop"]["global_step"])
trainer.fit(Net(), DataLoader(torch.ones(8, 100), batch_size=2), ckpt_path=saving.last_model_path)
"""


def test_checkpoints_are_written_and_read_where_no_thread_can_be_started(tmp_path: Path) -> None:
    """As at the limit on processes of a container; what is hashed with and without a thread is not hashed twice."""
    done = run_program("-c", WITHOUT_THREADS, folder=tmp_path, timeout=120)
    assert (done.stdout.split(), done.returncode) == (["1", "2", "3", "4"], 0), done.stderr
    file = HashedFile(tmp_path / "file")
    before = threading.stack_size(1 << 46)
    try:
        with file:
            file.write(bytes(1 << 17))
            threading.stack_size(before)
            file.write(bytes([1]) * (1 << 17))
            content = bytes(1 << 17) + bytes([1]) * (1 << 17)
            assert file.finish().sha256 == hashlib.sha256(content).hexdigest()
    finally:
        threading.stack_size(before)
