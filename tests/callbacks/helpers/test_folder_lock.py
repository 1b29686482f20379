"""Two runs never save into one folder, and a dead run does not keep its folder locked."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from programs import WatchedProgram, run_program
from scripted import Scripted, batches, trainer_in

from echelon import CSVLogger, TensorBoardLogger
from echelon.callbacks import Callback, GoodputMonitor, ModelCheckpoint, SampleLedger
from echelon.callbacks.helpers import folder_lock
from echelon.callbacks.helpers.folder_lock import LOCK, FolderLock
from echelon.common.errors import CheckpointError

HOLDER = """
import os, signal, sys, time
from pathlib import Path
from echelon.callbacks.helpers.folder_lock import FolderLock
lock = FolderLock()
job, number = sys.argv[2:] or ("", 0)
lock.take(Path(sys.argv[1]), run=1, **({"job": job, "round": int(number)} if job else {}))
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
time.sleep(600)
"""


def holder_of(folder: Path, *of_round: str) -> tuple[WatchedProgram, int]:
    """Start a process that holds the lock, and a child that inherits it; also return the child's process id."""
    process = WatchedProgram(["-c", HOLDER, folder, *of_round], folder=folder.parent)
    return process, int(process.readline())


def test_another_process_is_refused_until_the_holder_is_dead_though_its_child_lives(tmp_path: Path) -> None:
    process, child = holder_of(tmp_path)
    try:
        with pytest.raises(CheckpointError, match=rf"process {process.pid} on .* is saving into it; give .* dirpath"):
            FolderLock().take(tmp_path, run=1, patience=0.2)
        process.kill()
        process.wait()
        os.kill(child, 0)
        lock = FolderLock()
        lock.take(tmp_path, run=1, patience=0.2)
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} "):
            FolderLock().take(tmp_path, run=2)
        lock.release()
        assert not tmp_path.exists()  # nothing was saved into it
    finally:
        process.close()
        os.kill(child, signal.SIGKILL)


def test_a_later_round_of_a_run_does_not_wait_for_a_process_that_is_stopped(tmp_path: Path) -> None:
    process, child = holder_of(tmp_path, "10.0.0.1:29500/echelon/run", "3")
    os.kill(child, signal.SIGKILL)
    try:
        process.send_signal(signal.SIGSTOP)
        for job, number in (("10.0.0.1:29500/echelon/run", 3), ("10.0.0.1:29500/echelon/other", 4), ("", 0)):
            with pytest.raises(CheckpointError, match=f"process {process.pid} "):
                FolderLock().take(tmp_path, run=1, job=job, round=number, patience=0.1)
        lock = FolderLock()
        lock.take(tmp_path, run=1, job="10.0.0.1:29500/echelon/run", round=4, patience=0.1)
        assert f'"pid": {os.getpid()}' in (tmp_path / LOCK).read_text()
        lock.release()
        assert not tmp_path.exists()
    finally:
        process.close()


def test_who_has_lost_a_lock_does_not_remove_that_of_the_next_round(tmp_path: Path) -> None:
    lost, following = FolderLock(), FolderLock()
    lost.take(tmp_path, run=1, job="job", round=0)
    following.take(tmp_path, run=2, job="job", round=1)
    lost.release()
    assert (tmp_path / LOCK).exists()
    following.release()
    assert not tmp_path.exists()


TURNS = """
import os, sys
from pathlib import Path
from echelon.callbacks.helpers.folder_lock import FolderLock
folder, lock = Path(sys.argv[1]), FolderLock()
children = []
while len(children) < 3 and 0 not in children:
    children.append(os.fork())
for _ in range(100):
    lock.take(folder / "runs" / "saved", run=1, patience=60)
    (folder / "taken").touch(exist_ok=False)  # fails if another has the lock, too
    (folder / "taken").unlink()
    lock.release()
if 0 not in children:
    for child in children:
        assert os.waitpid(child, 0)[1] == 0
    print("done")
"""


def test_runs_that_take_turns_never_hold_a_folder_together_though_each_removes_it(tmp_path: Path) -> None:
    done = run_program("-c", TURNS, tmp_path, folder=tmp_path, timeout=120)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_who_finds_a_holder_dead_does_not_remove_the_lock_of_who_found_it_first(tmp_path: Path, monkeypatch) -> None:
    process, child = holder_of(tmp_path)
    process.kill()
    process.wait()
    first, second = FolderLock(), FolderLock()
    is_alive = folder_lock._is_alive

    def slowly(holder: dict[str, Any]) -> bool:  # as a process is that nothing keeps alone, such as after a stop
        if not first_has_it:
            first_has_it.append(True)
            (tmp_path / LOCK).unlink()
            first.take(tmp_path, run=1)
            return False
        return is_alive(holder)

    first_has_it: list[bool] = []
    monkeypatch.setattr(folder_lock, "_is_alive", slowly)
    monkeypatch.setattr(folder_lock, "_ALONE_WITHIN", 0.1)
    try:
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} "):
            second.take(tmp_path, run=2, patience=0.1)
        first.release()
        assert not tmp_path.exists()
    finally:
        process.close()
        os.kill(child, signal.SIGKILL)


def test_a_run_waits_for_one_that_is_about_to_end(tmp_path: Path) -> None:
    process, child = holder_of(tmp_path)
    os.kill(child, signal.SIGKILL)
    killer = threading.Timer(0.3, process.kill)
    killer.start()
    began = time.monotonic()
    lock = FolderLock()
    lock.take(tmp_path, run=1, patience=60)
    assert time.monotonic() - began < 30
    lock.release()
    process.wait()
    killer.join()
    process.close()


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, b'{"host": "a", "pid": -5, "start": 1e25, "run": 0}'])
def test_a_file_that_nobody_holds_is_no_lock_whatever_it_says(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK).write_bytes(content)
    lock = FolderLock()
    lock.take(tmp_path, run=1)
    lock.release()
    assert not (tmp_path / LOCK).exists()


def test_a_link_in_place_of_the_lock_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / LOCK).symlink_to(tmp_path / "precious")
    FolderLock().take(tmp_path / "ckpt", run=1)
    assert (tmp_path / "precious").read_text() == "text"


class SecondTrainer(Callback):
    """Fits another trainer into the same folder, while this one trains."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.error = folder, ""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        try:
            trainer_in(self.folder, ModelCheckpoint(self.folder / "ckpt"), max_epochs=1).fit(Scripted(), batches())
        except CheckpointError as error:
            self.error = str(error)


def test_a_second_run_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    second = SecondTrainer(tmp_path)
    two = [ModelCheckpoint(tmp_path / "ckpt"), ModelCheckpoint(tmp_path / "ckpt", monitor="step", mode="max")]
    trainer_in(tmp_path, *two, second, max_epochs=1).fit(Scripted(), batches())
    assert "must belong to one run" in second.error
    names = sorted(path.name for path in (tmp_path / "ckpt").iterdir())
    assert names == ["epoch=0-step=4-v1.ckpt", "epoch=0-step=4.ckpt"]
    trainer_in(tmp_path, ModelCheckpoint(tmp_path / "ckpt"), max_epochs=1).fit(Scripted(), batches())


SAVED = "logs/echelon_logs/version_0/checkpoints/sixth.ckpt"


class SecondJob(Callback):
    """Starts a fit into the folder of this one, while this one trains, and notes what it did to the folder."""

    def __init__(self, folder: Path, ckpt_path: str | None) -> None:
        self.folder, self.ckpt_path = folder, ckpt_path
        self.error, self.before, self.after = "", {}, {}

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 6:
            trainer.save_checkpoint(self.folder / SAVED)
            for logger in trainer.loggers:
                logger.save()
            self.before = self._contents()
            try:
                logged(self.folder, lr=0.2).fit(Scripted(lr=0.2), batches(), ckpt_path=self.ckpt_path)
            except CheckpointError as error:
                self.error = str(error)
            self.after = self._contents()

    def _contents(self) -> dict[str, bytes]:
        files = sorted(path for path in (self.folder / "logs").rglob("*") if path.is_file())
        return {str(path): path.read_bytes() for path in files}


def logged(folder: Path, *callbacks: Callback, lr: float = 0.1) -> Any:
    """Return a trainer with everything that writes into the folder of a run from its beginning."""
    loggers = [kind(folder / "logs", version=0) for kind in (CSVLogger, TensorBoardLogger)]
    callbacks = (*callbacks, ModelCheckpoint(save_last=True), SampleLedger(), GoodputMonitor())
    return trainer_in(folder, *callbacks, logger=loggers, max_epochs=3, log_every_n_steps=1)


@pytest.mark.parametrize("ckpt_path", [None, "last", SAVED])
def test_a_run_that_is_refused_has_touched_nothing_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ckpt_path: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    second = SecondJob(tmp_path, ckpt_path)
    logged(tmp_path, second).fit(Scripted(), batches())
    assert "must belong to one run" in second.error
    assert len(second.before) > 5
    assert second.after == second.before
