"""Trouble of the store while a run trains: it goes on, no checkpoint is lost, and nothing tells the credentials."""

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from chosen_requests import chosen
from proxy import Fault
from server import KEY, SECRET
from small import Regression, loader, quiet

from echelon import Callback, CSVLogger, ModelCheckpoint, SampleLedger
from echelon.common.errors import CheckpointError
from echelon.common.storage import as_path
from echelon.trainer import checkpoint

pytestmark = pytest.mark.slow

STATE = {"model": {"weight": torch.arange(3000.0)}, "loop": {"global_step": 1}}
IS_WRITE = {"matches": lambda request: request.method in ("PUT", "POST", "DELETE")}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))


def loads(path):
    return torch.equal(checkpoint.load(path)["model"]["weight"], STATE["model"]["weight"])


def every_end(proxy, prepare, act, check):
    """Let an action find a store that refuses everything from its first, second, ... request on, or one of each kind.

    Return how many requests it makes.
    """
    prepare(-1)
    proxy.reset_counts()
    act(-1)
    requests = proxy.reset_counts()
    for nth in chosen(requests):
        prepare(nth)
        proxy.fail(Fault("status", 403), nth, times=float("inf"))
        try:
            act(nth)
            has_failed = False
        except (CheckpointError, OSError):
            has_failed = True
        proxy.heal()
        check(nth, has_failed)
    return len(requests)


@pytest.mark.sweep
def test_a_save_that_is_cut_off_after_any_request_leaves_every_earlier_checkpoint(proxy, bucket):
    folder = as_path(bucket) / "runs"
    checkpoint.save(folder / "first.ckpt", STATE)

    def save(nth):
        checkpoint.save(folder / f"{nth}.ckpt", STATE)

    def check(nth, has_failed):
        found = {one.path.name for one in checkpoint.list_checkpoints(folder)}
        assert "first.ckpt" in found and loads(folder / "first.ckpt")
        assert has_failed or f"{nth}.ckpt" in found
        assert f"{nth}.ckpt" not in found or loads(folder / f"{nth}.ckpt")  # complete, or not listed

    assert every_end(proxy, lambda nth: None, save, check) > 3
    for one in checkpoint.list_checkpoints(folder):
        assert loads(one.path)


@pytest.mark.only_in_sweep
@pytest.mark.sweep
def test_a_removal_that_is_cut_off_after_any_request_leaves_the_others(proxy, bucket):
    folder = as_path(bucket) / "runs"
    origin = checkpoint.manifest.NO_RUN.after()
    checkpoint.save(folder / "kept.ckpt", STATE, origin=origin.after())

    def prepare(nth):
        checkpoint.save(folder / f"{nth}.ckpt", STATE, origin=origin)

    def remove(nth):
        checkpoint.remove_checkpoint(folder / f"{nth}.ckpt")

    def check(nth, has_failed):
        found = {one.path.name for one in checkpoint.list_checkpoints(folder)}
        assert f"{nth}.ckpt" not in found or loads(folder / f"{nth}.ckpt")
        assert loads(folder / "kept.ckpt")

    assert every_end(proxy, prepare, remove, check) > 1
    for one in checkpoint.list_checkpoints(folder):
        assert loads(one.path)


def test_an_answer_that_does_not_come_is_asked_for_again(proxy, bucket, monkeypatch):
    from fsspec.config import conf

    options = {"connect_timeout": 1, "read_timeout": 1, "retries": {"max_attempts": 1}}
    monkeypatch.setitem(conf, "s3", {"config_kwargs": options})
    folder = as_path(bucket) / "runs"
    proxy.fail(Fault("stall"), **IS_WRITE)
    checkpoint.save(folder / "a.ckpt", STATE)
    proxy.fail(Fault("stall"), matches=lambda request: request.method == "GET")
    assert loads(folder / "a.ckpt")


def test_training_goes_on_while_a_save_can_still_be_made_good(proxy, bucket):
    steps = []

    class Trouble(Callback):
        def on_train_step_end(self, trainer, module):
            steps.append(trainer.global_step)
            if trainer.global_step == 2:
                for kind in ("status", "reset", "status", "lost"):
                    proxy.fail(Fault(kind), nth=len(proxy._rules), **IS_WRITE)

    folder = f"{bucket}/runs"
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    quiet(max_steps=6, max_epochs=-1, callbacks=[Trouble(), saver], enable_checkpointing=True).fit(
        Regression(), loader()
    )
    assert steps == list(range(1, 7))
    found = checkpoint.list_checkpoints(folder)
    assert found[-1].path.name.endswith("step=6.ckpt")
    for one in found:
        checkpoint.verify(one.path)
    assert sum(request.fault is not None for request in proxy.requests) == 4


def test_no_process_and_no_file_of_a_run_tells_the_credentials(proxy, bucket, tmp_path, capfd):
    seen, is_over = set(), threading.Event()

    def watch():
        while not is_over.is_set():
            for process in psutil.Process().children(recursive=True):
                with suppress(OSError):
                    seen.add((process.pid, Path(f"/proc/{process.pid}/cmdline").read_bytes()))
            time.sleep(0.1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    root = f"{bucket}/runs"
    try:
        callbacks = [ModelCheckpoint(save_last=True), SampleLedger()]
        logger = CSVLogger(root)
        settings = {"strategy": "ddp", "devices": 2, "callbacks": callbacks, "logger": logger}
        run = quiet(max_steps=2, default_root_dir=root, enable_checkpointing=True, **settings)
        run.fit(Regression(), loader())
        proxy.fail(Fault("status", 403), times=float("inf"))
        with pytest.raises(Exception, match="not permitted") as caught:
            run.fit(Regression(), loader())
    finally:
        is_over.set()
        watcher.join()
    proxy.heal()
    told = [repr(caught.value).encode(), *(line for _, line in seen), *(text.encode() for text in capfd.readouterr())]
    told += [place.read_bytes() for place in as_path(bucket).find()]
    here = [Path(folder, name) for folder, _, names in os.walk(tmp_path) for name in names]
    told += [file.read_bytes() for file in here if file.is_file()]  # not the sockets of processes
    assert len(told) > 10 and len({pid for pid, _ in seen}) >= 2
    assert any(os.fsencode(sys.executable) in text or b"forkserver" in text for text in told)
    for secret in (KEY, SECRET):
        assert not [text[:200] for text in told if secret.encode() in text]


class At(Callback):
    """Does something at the end of a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == self.step:
            self.act()


def train(folder, steps, *callbacks, ckpt_path=None, **settings):
    saver = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
    trainer = quiet(
        max_steps=steps, max_epochs=-1, callbacks=[*callbacks, saver], enable_checkpointing=True, **settings
    )
    trainer.fit(Regression(), loader(), ckpt_path=ckpt_path)
    return trainer


def steps_in(folder):
    return [one.path.name.partition("step=")[2].removesuffix(".ckpt") for one in checkpoint.list_checkpoints(folder)]


def test_credentials_that_expire_are_read_again_while_the_run_goes_on(proxy, bucket, monkeypatch):
    newer = "AKIARENEWED000000000"

    def expire():
        proxy.fail(Fault("status", 400), times=float("inf"), matches=lambda request: request.key == KEY)
        threading.Timer(1.0, monkeypatch.setenv, ("AWS_ACCESS_KEY_ID", newer)).start()  # by whoever renews them

    train(f"{bucket}/runs", 4, At(2, expire))
    assert steps_in(f"{bucket}/runs") == ["1", "2", "3", "4"]
    assert {request.key for request in proxy.requests if request.fault is None} >= {KEY, newer}
    assert any(request.fault is not None for request in proxy.requests)


def test_a_listing_that_lags_does_not_hide_the_last_checkpoint(proxy, bucket):
    folder, root = f"{bucket}/runs", f"{bucket}/root"
    as_path(f"{folder}/first.txt").write_text("so that there is a listing")
    proxy.keeps_listings = True
    assert checkpoint.list_checkpoints(folder) == []
    train(folder, 2)
    assert [entry.name for entry in as_path(folder).store.list(as_path(folder))] == ["first.txt"]
    assert steps_in(folder)[-1] == "2"
    assert train(folder, 3, ckpt_path="last").global_step == 3
    assert checkpoint.newest_valid(folder).name.endswith("step=3.ckpt")
    runs = [quiet(max_steps=n, default_root_dir=root, logger="csv", enable_checkpointing=True) for n in (1, 2)]
    for run in runs:
        run.fit(Regression(), loader())
    assert [run.logger.version for run in runs] == [0, 1]
    again = quiet(max_steps=3, default_root_dir=root, logger="csv", enable_checkpointing=True)
    again.fit(Regression(), loader(), ckpt_path="last")
    assert (again.logger.version, again.global_step) == (1, 3)


def test_the_clock_of_a_machine_and_that_of_the_store_do_not_decide_which_checkpoint_is_the_last(bucket, monkeypatch):
    folder, now = f"{bucket}/runs", time.time
    train(folder, 1)
    monkeypatch.setattr(time, "time", lambda: now() - 10 * 86400)  # another machine, whose clock is behind
    train(folder, 2, ckpt_path="last")
    monkeypatch.undo()
    assert steps_in(folder) == ["1", "2"]
    # a copy of the first one is the newest object for the store
    first = as_path(folder) / "epoch=0-step=1.ckpt"
    for one in first.find():
        one.write_bytes(one.read_bytes())
    assert steps_in(folder) == ["1", "2"] and checkpoint.newest_valid(folder).name == "epoch=0-step=2.ckpt"


def test_a_clock_that_the_store_refuses_is_named(proxy, bucket):
    from echelon.common.errors import StoreError
    from echelon.common.storage.retry import Retry

    def skewed():
        raise OSError("RequestTimeTooSkewed: The difference between the request time and the current time is too large")

    with pytest.raises(StoreError, match="set the clock of this machine"):
        Retry().call("Writing x", skewed)


def test_answers_that_come_in_drops_are_read_to_the_end(proxy, bucket):
    folder = as_path(bucket) / "runs"
    checkpoint.save(folder / "a.ckpt", STATE)
    proxy.fail(Fault("slow", seconds=1.5), times=float("inf"), matches=lambda request: request.method == "GET")
    assert loads(folder / "a.ckpt")
