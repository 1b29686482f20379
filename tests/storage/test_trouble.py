"""Requests that fail while a checkpoint is saved, read and deleted, and what is told of credentials."""

import logging

import pytest
import torch
from chosen_requests import chosen
from proxy import Fault
from server import KEY, SECRET
from small import Regression, loader, quiet

from echelon import ModelCheckpoint
from echelon.common.errors import CheckpointError
from echelon.common.storage import as_path
from echelon.common.storage.retry import Retry
from echelon.trainer import checkpoint

STATE = {"model": {"weight": torch.arange(30000.0)}, "loop": {"global_step": 1}}
FAULTS = [Fault("status", 503), Fault("status", 429), Fault("reset"), Fault("lost"), Fault("truncate")]


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Repeat requests as often as usual, at once."""
    monkeypatch.setattr("echelon.common.storage.retry.default_retry", Retry)
    monkeypatch.setattr("echelon.common.storage.retry.time.sleep", lambda seconds: None)


def every_request(proxy, act, check):
    """Let each request that an action makes fail once, in turn, or one of each kind; the action succeeds all the same.

    Return how many requests it makes.
    """
    proxy.reset_counts()
    act(-1)
    requests = proxy.reset_counts()
    check(-1)
    for nth in chosen(requests):
        proxy.fail(FAULTS[nth % len(FAULTS)], nth)
        act(nth)
        proxy.heal()
        check(nth)
    return len(requests)


@pytest.mark.slow
@pytest.mark.sweep
def test_a_save_a_load_and_a_removal_survive_each_request_that_fails(proxy, bucket):
    folder = as_path(bucket) / "runs"

    def save(nth):
        checkpoint.save(folder / "a.ckpt", STATE)

    def load(nth):
        assert torch.equal(
            checkpoint.load(folder / "a.ckpt", lazy=["model"])["model"]["weight"].clone(), STATE["model"]["weight"]
        )

    def remove(nth):
        origin = checkpoint.manifest.NO_RUN.after()
        checkpoint.save(folder / "b.ckpt", STATE, origin=origin)
        checkpoint.save(folder / "c.ckpt", STATE, origin=origin.after())
        assert checkpoint.remove_checkpoint(folder / "b.ckpt")

    assert every_request(proxy, save, load) > 5
    assert every_request(proxy, load, load) > 3
    assert every_request(proxy, remove, load) > 10
    assert len({place.parent for place in (folder / "a.ckpt").find()}) == 2


def test_a_store_that_keeps_failing_ends_the_save_and_older_checkpoints_stay(proxy, bucket):
    folder = as_path(bucket) / "runs"
    checkpoint.save(folder / "a.ckpt", STATE)
    proxy.fail(Fault("status", 503), times=float("inf"), matches=lambda request: request.method == "PUT")
    with pytest.raises(CheckpointError, match=r"could not be written: Writing .* failed 8 times.*untouched"):
        checkpoint.save(folder / "b.ckpt", STATE)
    proxy.heal()
    assert [found.path.name for found in checkpoint.list_checkpoints(folder)] == ["a.ckpt"]
    checkpoint.verify(folder / "a.ckpt")


def test_a_manifest_whose_answers_are_lost_has_its_files(proxy, bucket):
    folder = as_path(bucket) / "runs"
    checkpoint.save(folder / "a.ckpt", STATE)

    def publishes(request):
        return request.method == "PUT" and request.target.split("?")[0].endswith("a.ckpt/manifest.json")

    proxy.fail(Fault("lost"), times=float("inf"), matches=publishes)
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpoint.save(folder / "a.ckpt", {**STATE, "loop": {"global_step": 2}})
    proxy.heal()
    checkpoint.verify(folder / "a.ckpt")
    assert checkpoint.load(folder / "a.ckpt")["loop"]["global_step"] in (1, 2)


def test_a_write_that_is_denied_is_told_at_once(proxy, bucket):
    proxy.fail(Fault("status", 403), times=float("inf"), matches=lambda request: request.method == "PUT")
    with pytest.raises(CheckpointError, match="not permitted"):
        checkpoint.save(as_path(bucket) / "runs/a.ckpt", STATE)
    assert sum(request.method == "PUT" for request in proxy.reset_counts()) <= 2


def test_credentials_stand_in_no_checkpoint_log_or_error(proxy, bucket, caplog, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)
    folder = f"{bucket}/runs"
    quiet(max_steps=2, callbacks=ModelCheckpoint(folder), enable_checkpointing=True).fit(Regression(), loader())
    told = [record.getMessage() for record in caplog.records] + list(capfd.readouterr())
    proxy.fail(Fault("status", 403), times=float("inf"))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(f"{folder}/epoch=0-step=2.ckpt")
    told += [str(caught.value)]
    proxy.heal()
    told += [place.read_bytes().decode("latin-1") for place in as_path(folder).find()]
    assert len(told) > 4
    for secret in (KEY, SECRET):
        assert not [text for text in told if secret in text]
