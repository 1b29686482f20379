"""Uploads that are under way: shown while training goes on, and complete before a run ends, however it ends."""

import os
import signal
import subprocess
import threading
import time

import pytest
import torch
from programs import ForkedProgram
from proxy import Fault
from server import environment
from small import Regression, loader, quiet
from store_program import main
from sweep import dealt

from echelon import Callback, GoodputMonitor, ModelCheckpoint, TQDMProgressBar
from echelon.callbacks.goodput.ledger import read_ledger
from echelon.callbacks.goodput.spans import account_for_time
from echelon.common.errors import ConfigError
from echelon.common.storage import as_path
from echelon.trainer.checkpoint import list_checkpoints, verify
from echelon.trainer.cli.goodput import as_json, render_account

PROGRAM = os.path.join(os.path.dirname(__file__), "store_program.py")
PATIENCE = 120.0


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def hold(proxy, name="model.safetensors", nth=0):
    """Let the nth upload of a file of a checkpoint wait for the event that is returned."""
    goes_on = threading.Event()
    fault = Fault("stall", until=goes_on, seconds=PATIENCE)
    proxy.fail(fault, nth, matches=lambda request: request.method == "PUT" and name in request.target)
    return goes_on


def wait_for(condition, why=lambda: ""):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, why()
        time.sleep(0.02)


def test_the_bar_and_the_ledger_show_what_is_being_uploaded_and_for_which_step(proxy, bucket, tmp_path):
    goes_on, shown = hold(proxy), []

    class Looks(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            bar = trainer.progress_bar_callback
            shown.append(bar.get_metrics(trainer, module).get("upload"))

        def on_train_step_end(self, trainer, module):
            if trainer.global_step == 2:
                goes_on.set()

    saver = ModelCheckpoint(f"{bucket}/runs", every_n_train_steps=1, save_top_k=-1)
    callbacks = [Looks(), saver, GoodputMonitor(every_seconds=0), TQDMProgressBar()]
    settings = {"callbacks": callbacks, "enable_checkpointing": True, "enable_progress_bar": True, "logger": "csv"}
    trainer = quiet(max_steps=4, max_epochs=-1, default_root_dir=tmp_path, **settings)
    trainer.fit(Regression(), loader())
    assert shown[0] is None and shown[1].startswith("(step 1, 0% of ") and shown[1].endswith("B)")
    assert trainer.pending_upload is None
    ledger = read_ledger(tmp_path / trainer.log_dir / "goodput.jsonl")
    (first, *_), last = (one.upload for one in ledger.rounds[0].periods if one.upload), ledger.rounds[0].periods[-1]
    assert first.step == 1 and 0 < first.left <= first.size and last.upload is None
    assert as_json(account_for_time(ledger))["rounds"][0]["upload"] is None
    cut = type(ledger)([type(ledger.rounds[0])(ledger.rounds[0].start, ledger.rounds[0].periods[:2], None)])
    if cut.rounds[0].periods[-1].upload:
        assert "of the checkpoint of step 1 were still to be" in render_account(account_for_time(cut))


def test_a_second_save_waits_for_the_first_whose_upload_is_slow(proxy, bucket):
    goes_on, begun = hold(proxy), []
    told = threading.Timer(1.0, goes_on.set)

    class Looks(Callback):
        def on_train_step_end(self, trainer, module):
            begun.append((trainer.global_step, goes_on.is_set()))
            if trainer.global_step == 2:
                told.start()

    saver = ModelCheckpoint(f"{bucket}/runs", every_n_train_steps=2, save_top_k=-1)
    trainer = quiet(max_steps=6, max_epochs=-1, callbacks=[Looks(), saver], enable_checkpointing=True)
    trainer.fit(Regression(), loader())
    told.join()
    assert begun[:3] == [(1, False), (2, False), (3, False)]  # a step beside the upload
    assert begun[4] == (5, True)  # after the save of step 4, which has waited
    assert [found.path.name.partition("step=")[2] for found in list_checkpoints(f"{bucket}/runs")] == [
        *("2.ckpt", "4.ckpt", "6.ckpt")
    ]
    assert trainer.checkpoint_seconds > 0.5


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("number", "when"), dealt([signal.SIGINT, signal.SIGTERM], ["in the middle", "at the end"], [0])
)
def test_a_run_that_is_told_to_end_commits_what_is_under_way(number, when, proxy, bucket, tmp_path):
    steps = 4 if when == "at the end" else 1_000_000
    goes_on = hold(proxy, nth=1 if when == "at the end" else 0)
    environ = {**os.environ, **environment(proxy.address), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    log, folder = tmp_path / "log", f"{bucket}/runs"
    program = ForkedProgram([PROGRAM, folder, tmp_path, str(steps)], folder=tmp_path, environ=environ, output=log)
    try:
        wait_for(lambda: any(request.fault for request in list(proxy.requests)), log.read_text)
        if when == "at the end":
            wait_for((tmp_path / "trained").exists, log.read_text)
        os.kill(program.pid, number)
        with pytest.raises(subprocess.TimeoutExpired):  # it does not end before the store has what it is sent
            program.wait(1.0)
        goes_on.set()
        code = program.wait(PATIENCE)
    finally:
        goes_on.set()
        if program.poll() is None:
            program.kill()
            program.wait(PATIENCE)
    assert code == (143 if number == signal.SIGTERM else 1), log.read_text()
    found = list_checkpoints(folder)
    for one in found:
        verify(one.path)
    assert f"resume with fit(..., ckpt_path='{found[-1].path}')" in log.read_text()
    assert not (as_path(folder) / ".lock").exists()
    if when == "at the end":
        assert found[-1].path.name.endswith("step=4.ckpt")
        for out, place in ((tmp_path / "one", folder), (tmp_path / "two", str(tmp_path / "two" / "checkpoints"))):
            out.mkdir()
            main(place, out, 6)
        ours, theirs = (torch.load(tmp_path / name / "weights.pt") for name in ("one", "two"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_temporary_folder_that_cannot_be_written_is_told_before_the_first_step(bucket, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"needs a local folder for files that grow.*set TMPDIR"):
        quiet(max_steps=1, default_root_dir=f"{bucket}/runs", logger="csv")


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "echelon-test", str(folder)]
    try:
        made = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        made = False
    if not made:
        pytest.skip("a disk of 64 kB cannot be mounted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_without_room_for_a_checkpoint_in_one_file_is_told_before_the_first_step(
    bucket, small_disk, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))

    class Wide(Regression):
        def __init__(self):
            super().__init__()
            self.more = torch.nn.Linear(300, 300)

        def training_step(self, batch, batch_idx):
            raise AssertionError("a step was taken")

    def fit(**settings):
        saver = ModelCheckpoint(f"{bucket}/runs", single_file=True)
        quiet(max_steps=1, callbacks=saver, enable_checkpointing=True, **settings).fit(Wide(), loader())

    with pytest.raises(ConfigError, match=r"staged in the temporary folder '.*disk'.* free, and takes 361 kB; set TMP"):
        fit(num_sanity_val_steps=0)


def test_a_spool_folder_that_is_full_does_not_end_the_run(bucket, small_disk, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(small_disk))

    class Fills(Callback):
        def on_train_step_end(self, trainer, module):
            if trainer.global_step == 2:
                with pytest.raises(OSError, match="No space left"):
                    (small_disk / "full").write_bytes(bytes(1 << 20))
            trainer.log_metrics({f"metric {number}": number / 3 for number in range(200)})

    root = f"{bucket}/runs"
    saver = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    settings = {"logger": "csv", "log_every_n_steps": 1, "callbacks": [Fills(), saver], "enable_checkpointing": True}
    trainer = quiet(max_steps=6, max_epochs=-1, default_root_dir=root, **settings)
    with pytest.warns(UserWarning, match="No space left"):
        trainer.fit(Regression(), loader())
    assert trainer.global_step == 6
    found = list_checkpoints(saver.dirpath)
    assert [one.path.name.partition("step=")[2] for one in found] == ["2.ckpt", "4.ckpt", "6.ckpt"]
    for one in found:
        verify(one.path)
