"""Stores other than buckets: pages of a server of HTTP, which can only be read, and schemes with a host in the URL."""

import functools
import os
import threading
import warnings
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from small import Regression, loader, quiet

from echelon import ModelCheckpoint
from echelon.common.errors import CheckpointError, ConfigError
from echelon.common.storage import as_path
from echelon.common.storage.filesystem import forget_filesystem
from echelon.common.storage.local_copy import local_folder
from echelon.trainer import checkpoint

STATE = {"model": {"weight": torch.arange(3000.0)}, "loop": {"global_step": 1}}


class Pages(SimpleHTTPRequestHandler):
    """Files of a folder, and pages of links as Apache writes them: to the folder above, and to sort them."""

    def list_directory(self, path):
        names = [f"{one.name}/" if one.is_dir() else one.name for one in os.scandir(path)]
        links = ["/", "?C=N;O=D", "https://example.org/", *names]
        body = "".join(f'<a href="{link.replace("=", "%3D") if link in names else link}">x</a>' for link in links)
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *args):
        pass


@contextmanager
def served(folder):
    """Yield the URL of a folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Pages, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def fit(folder, ckpt_path=None, max_steps=2):
    saver = ModelCheckpoint(str(folder / "runs"), every_n_train_steps=1, save_top_k=-1)
    trainer = quiet(max_steps=max_steps, callbacks=[saver], enable_checkpointing=True, default_root_dir=str(folder))
    trainer.fit(module := Regression(), loader(), ckpt_path=ckpt_path)
    return [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.filterwarnings("ignore:.*ignores the range of bytes:UserWarning")
def test_a_run_goes_on_from_a_checkpoint_that_a_web_server_has(tmp_path):
    whole = fit(tmp_path / "here", max_steps=4)
    with served(tmp_path) as url:
        first = next(iter(checkpoint.list_checkpoints(as_path(f"{url}/here/runs"))))
        assert str(first.path) == f"{url}/here/runs/epoch=0-step=1.ckpt"
        checkpoint.verify(first.path)
        for ckpt_path in (str(first.path), first.path):
            torch.testing.assert_close(fit(tmp_path / "there", ckpt_path, max_steps=4), whole, rtol=0, atol=0)
        module = Regression()
        *_, last = checkpoint.list_checkpoints(as_path(f"{url}/here/runs"))
        module.load_state_dict(checkpoint.load(last.path)["model"])
        assert torch.equal(next(module.parameters()).detach(), whole[0])
        with pytest.raises(CheckpointError, match=r"epoch=9.ckpt' does not exist; give another path"):
            fit(tmp_path / "there", f"{url}/here/runs/epoch=9.ckpt")


def test_a_folder_of_a_web_server_is_copied_and_nothing_above_it(tmp_path):
    (tmp_path / "models" / "deep=er").mkdir(parents=True)
    (tmp_path / "models" / "config.json").write_text("{}")
    (tmp_path / "models" / "deep=er" / "a b.bin").write_bytes(bytes(range(200)))
    (tmp_path / "secret").write_text("not asked for")
    with served(tmp_path) as url:
        folder = as_path(f"{url}/models")
        assert folder.is_dir() and not folder.is_file() and (folder / "config.json").is_file()
        assert {str(path): size for path, size in folder.find().items()} == {
            f"{url}/models/config.json": 2,
            f"{url}/models/deep=er/a b.bin": 200,
        }
        copy = local_folder(folder)
        assert (copy / "deep=er" / "a b.bin").read_bytes() == bytes(range(200))
        assert sorted(path.name for path in copy.iterdir()) == ["config.json", "deep=er"]


def test_a_server_that_ignores_ranges_is_told_of_once(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(100)))
    with served(tmp_path) as url:
        path = as_path(f"{url}/file")
        with pytest.warns(UserWarning, match=r"http://127.0.0.1:\d+ ignores the range of bytes"):
            assert path.store.read_range(path, 10, 20) == bytes(range(10, 20))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert path.store.read_range(path, 90, 100) == bytes(range(90, 100))


def test_a_checkpoint_of_a_public_bucket_is_read_without_its_listing(bucket, s3_server):
    checkpoint.save(as_path(bucket) / "a.ckpt", STATE)
    client = as_path(bucket).store.mount(as_path(bucket)).fs
    for path in as_path(bucket).find():
        name, key = path.key.split("/", 1)
        client.call_s3("put_object_acl", Bucket=name, Key=key, ACL="public-read")
    public = as_path(f"{s3_server}/{bucket.removeprefix('s3://')}/a.ckpt")
    checkpoint.verify(public)
    assert torch.equal(checkpoint.load(public, lazy=["model"])["model"]["weight"].clone(), STATE["model"]["weight"])


def test_nothing_is_written_over_http(tmp_path):
    with served(tmp_path) as url, pytest.raises(ConfigError, match=r"can only be read; write to .* as ckpt_path"):
        fit(as_path(f"{url}/runs"))


class OfHost(MemoryFileSystem):
    """Files in memory, those of each host apart, as HDFS and SFTP have them: the host is no part of a path."""

    protocol = "hosts"
    hosts: ClassVar = {}

    def __init__(self, host, **options):
        super().__init__(**options)
        self.store, self.pseudo_dirs = self.hosts.setdefault(host, ({}, [""]))

    @classmethod
    def _strip_protocol(cls, path):
        path = str(path).removeprefix("hosts://")
        return (path if path.startswith("/") else "/" + path.partition("/")[2]).rstrip("/")

    @staticmethod
    def _get_kwargs_from_urls(url):
        return {"host": url.removeprefix("hosts://").split("/", 1)[0]}


@pytest.fixture
def hosts():
    fsspec.register_implementation("hosts", OfHost, clobber=True)
    yield OfHost.hosts
    OfHost.hosts.clear()
    forget_filesystem("hosts")


def test_each_host_of_a_url_has_its_own_files(hosts):
    one, other = (as_path(f"hosts://{name}:8020/runs") for name in ("one", "other"))
    checkpoint.save(one / "a.ckpt", STATE)
    assert "a.ckpt" in {path.name for path in one.iterdir()}
    assert not other.exists() and list(hosts) == ["one:8020", "other:8020"]
    assert all(str(path).startswith("hosts://one:8020/runs/a.ckpt/") for path in (one / "a.ckpt").find())
    assert torch.equal(checkpoint.load(one / "a.ckpt")["model"]["weight"], STATE["model"]["weight"])
    whole = fit(as_path("hosts://one:8020/fits"))
    assert torch.equal(fit(as_path("hosts://one:8020/fits"), "last")[0], whole[0])
    one.store.delete_all(one)
    assert not one.exists() and as_path("hosts://one:8020/fits").exists()
    assert not hosts["other:8020"][0]
