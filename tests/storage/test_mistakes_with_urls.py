"""Mistakes with URLs: each is answered in the caller's process, before a worker starts, with what to do, in seconds."""

import os
import socket
import sys
import time
from contextlib import contextmanager

import psutil
import pytest
import torch
from proxy import Fault

from echelon import CSVLogger, Trainer, TrainModule
from echelon.callbacks import ModelCheckpoint
from echelon.common.errors import CheckpointError, ConfigError, EchelonError, MissingDependencyError
from echelon.common.storage.filesystem import forget_filesystem

pytestmark = pytest.mark.slow


class Line(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(root, ckpt_path=None, **settings):
    """Fit on two processes, none of which may start."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "max_steps": 1, "accelerator": "cpu"}
    trainer = Trainer(**{**quiet, "strategy": "ddp", "devices": 2, **settings}, default_root_dir=root)
    trainer.fit(Line(), torch.utils.data.DataLoader(torch.ones(2, 1)), ckpt_path=ckpt_path)


@contextmanager
def answered(kind, *words):
    """Expect an error of a kind, with these words, within 10 seconds, and no process beside this one."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        yield caught
    assert time.monotonic() - began < 10
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value).strip()


def test_a_bucket_that_does_not_exist_is_not_made(bucket):
    with answered(ConfigError, "default_root_dir='s3://no-such-bucket/runs'", "does not exist", "correct its name"):
        fit("s3://no-such-bucket/runs")
    with answered(ConfigError, "'s3://no-such-bucket/runs", "does not exist"):  # not made by the first
        fit("s3://no-such-bucket/runs")


def test_a_typing_error_in_the_scheme():
    with answered(ConfigError, "default_root_dir='s4://bucket/runs'", "scheme 's4'", "s3"):
        fit("s4://bucket/runs")


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with answered(MissingDependencyError, "pip install gcsfs"):
        fit("gs://bucket/runs")


@pytest.mark.parametrize("what", ["root", "dirpath", "save_dir"])
def test_writes_that_are_not_permitted(bucket, proxy, tmp_path, what):
    proxy.fail(Fault("status", 403), times=float("inf"), matches=lambda request: request.method == "PUT")
    url = f"{bucket}/runs"
    settings = {
        "root": {"root": url},
        "dirpath": {"root": tmp_path, "callbacks": ModelCheckpoint(url)},
        "save_dir": {"root": tmp_path, "logger": CSVLogger(url)},
    }[what]
    with answered(ConfigError, url, "not permitted", "check the credentials"):
        fit(**settings)


def test_credentials_that_are_wrong_or_missing(bucket, proxy, monkeypatch):
    proxy.fail(Fault("status", 403), times=float("inf"))
    with answered(ConfigError, f"{bucket}/runs", "not permitted", "check the credentials"):
        fit(f"{bucket}/runs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    proxy.heal()
    forget_filesystem("s3")
    with answered(ConfigError, f"{bucket}/runs", "Unable to locate credentials", "check the credentials"):
        fit(f"{bucket}/runs")


def test_a_url_with_a_query():
    with answered(ConfigError, "default_root_dir='s3://bucket/runs'", "a query"):
        fit("s3://bucket/runs?region=eu-west-1")


def test_credentials_inside_the_url_are_refused_and_not_repeated():
    with answered(ConfigError, "credentials in the URL", "environment") as caught:
        fit("s3://AKIA123:very-secret@bucket/runs")
    assert "very-secret" not in str(caught.value) and "AKIA123" not in str(caught.value)


@pytest.mark.parametrize("joined", [os.path.abspath("s3://bucket/runs"), "data/s3://bucket/runs"])
def test_a_url_inside_a_local_path(joined):
    with answered(ConfigError, "a URL inside a local path", "give s3://bucket/runs alone"):
        fit(joined)


def test_no_bucket_at_all_and_a_name_that_no_bucket_has(bucket):
    with answered(ConfigError, "names no bucket"):
        fit("s3://")
    with answered(ConfigError, "default_root_dir='s3://Not_A Bucket!/runs'"):
        fit("s3://Not_A Bucket!/runs")


def test_a_folder_without_a_checkpoint(bucket):
    with answered(CheckpointError, f"{bucket}/runs/nothing"):
        fit(f"{bucket}/runs", ckpt_path=f"{bucket}/runs/nothing")


def test_an_empty_bucket_as_a_checkpoint(bucket, tmp_path):
    with answered(CheckpointError, f"ckpt_path={bucket!r} has no objects; give the path of a checkpoint."):
        fit(str(tmp_path), ckpt_path=bucket)


def test_a_checkpoint_in_a_bucket_that_does_not_exist(bucket, tmp_path):
    with answered(EchelonError, "no-such-bucket"):
        fit(tmp_path, ckpt_path="s3://no-such-bucket/runs/last.ckpt")


def test_an_endpoint_where_nobody_listens(bucket, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and never listens
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        with answered(ConfigError, f"{bucket}/runs", "endpoint"):
            fit(f"{bucket}/runs")


@pytest.mark.only_in_sweep  # test_store.py has a silent one
def test_an_endpoint_that_never_answers(bucket, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with answered(ConfigError, f"{bucket}/runs", "does not answer", "AWS_ENDPOINT_URL"):
            fit(f"{bucket}/runs")


def test_a_place_that_can_only_be_read(s3_server, bucket):
    with answered(ConfigError, f"default_root_dir='{s3_server}/bucket/runs' can only be read", "as ckpt_path"):
        fit(f"{s3_server}/bucket/runs")
