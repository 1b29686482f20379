"""Paths that are URLs, and the objects behind them: fsspec's memory, and S3 on loopback."""

import os
import pickle
import secrets
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from echelon.common.errors import ConfigError, MissingDependencyError, StoreError
from echelon.common.storage import Upload, any_path, as_path, check_store, home_of, is_url, spool_folder
from echelon.common.storage.retry import Retry
from echelon.common.storage.store import PART


@pytest.fixture(params=["memory", "s3"])
def folder(request):
    if request.param == "memory":
        return as_path(f"memory://runs-{secrets.token_hex(4)}")
    return as_path(request.getfixturevalue("bucket")) / "runs"


def test_a_path_answers_as_a_local_one_does():
    path = as_path("s3://bucket/runs/a.ckpt")
    assert isinstance(as_path("runs/a.ckpt"), Path)
    assert (str(path), path.name, path.suffix, str(path.parent)) == (
        "s3://bucket/runs/a.ckpt",
        "a.ckpt",
        ".ckpt",
        "s3://bucket/runs",
    )
    assert path == as_path("s3:/bucket//runs/") / "a.ckpt"  # what pathlib leaves of a URL
    assert pickle.loads(pickle.dumps(path)) == path and hash(path)
    assert str(path.relative_to("s3://bucket")) == "runs/a.ckpt"
    assert [str(one) for one in path.parents] == ["s3://bucket/runs", "s3://bucket"]
    assert is_url("S3://b/x") and not is_url("runs/x") and not is_url("C:\\runs") and not is_url("C:/runs")


def test_a_path_is_never_opened_as_a_local_file():
    path = as_path("s3://bucket/runs")
    with pytest.raises(TypeError):
        os.open(path, os.O_RDONLY)
    with pytest.raises(TypeError):
        os.path.exists(path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s4://bucket/runs", "scheme 's4'.*, s3"),
        ("s3://bucket/runs?versionId=1", "a query"),
        ("s3://bucket/runs#1", "a fragment"),
        ("s3://bucket/../runs", "'..'"),
        ("s3://", "names no bucket"),
    ],
)
def test_a_url_that_is_not_possible_is_refused(url, message):
    with pytest.raises(ConfigError, match=message):
        any_path("dirpath", url)


def test_credentials_in_a_url_are_refused_and_not_printed():
    with pytest.raises(ConfigError, match="credentials in the URL") as caught:
        any_path("dirpath", "s3://AKIA123:verysecret@bucket/runs")
    assert "verysecret" not in str(caught.value) and "AKIA123" not in str(caught.value)


def test_a_missing_package_is_named():
    with pytest.raises(MissingDependencyError, match="pip install gcsfs"):
        as_path("gs://bucket/runs").read_bytes()


def test_objects_are_written_read_listed_and_deleted(folder):
    check_store(folder)
    assert not folder.exists() and list(folder.iterdir()) == [] and not folder.is_dir()
    path = folder / "a" / "one"
    path.write_bytes(b"0123456789")
    (folder / "two").write_bytes(b"")
    assert path.read_bytes() == b"0123456789" and path.store.read_range(path, 2, 5) == b"234"
    assert [one.name for one in folder.iterdir()] == ["a", "two"] and (folder / "a").is_dir()
    assert path.is_file() and not (folder / "a").is_file() and (folder / "two").is_file()
    assert folder.find() == {path: 10, folder / "two": 0}
    assert list(folder.glob("*/one")) == [path]
    with pytest.raises(FileNotFoundError):
        (folder / "three").read_bytes()
    folder.store.delete([path, folder / "missing"])
    folder.store.delete_all(folder)
    assert folder.find() == {}


def test_one_of_many_writes_an_object_that_must_be_new(folder):
    path, results = folder / "lock", []
    threads = [
        threading.Thread(target=lambda n=n: results.append(path.store.write_if_absent(path, b"%d" % n)))
        for n in range(4 if folder.scheme == "s3" else 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results.count(True) == 1
    assert not path.store.write_if_absent(path, b"later")


def test_a_large_object_is_sent_in_parts_and_appears_whole(folder):
    content, path = secrets.token_bytes(2 * PART + 1000), folder / "large"
    with Upload(path, len(content)) as upload:
        upload.write(memoryview(content)[: PART + 5])
        if folder.scheme == "s3":
            assert not path.exists()
        upload.write(memoryview(content)[PART + 5 :])
        assert upload.finish() == len(content)
    assert path.read_bytes() == content
    with pytest.raises(TypeError), Upload(folder / "broken", len(content)) as upload:
        _write_and_fail(upload, content)
    if folder.scheme == "s3":
        assert not (folder / "broken").exists()


def _write_and_fail(upload, content):
    upload.write(content)
    raise TypeError


def _read_in_child(path, queue, environment):
    os.environ.update(environment)  # a fork server that an earlier test has started has that of its own beginning
    queue.put(path.read_bytes())


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_process_of_a_process_reads_too(bucket, method):
    import multiprocessing

    path = as_path(bucket) / "x"
    path.write_bytes(b"read")
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=_read_in_child, args=(path, queue, dict(os.environ)))
    child.start()
    try:
        assert queue.get(timeout=60) == b"read"
    finally:
        child.kill()
        child.join()


def test_a_bucket_that_does_not_exist_is_not_made(bucket):
    began = time.monotonic()
    with pytest.raises(ConfigError, match="'no-such-bucket', which does not exist"):
        check_store(as_path("s3://no-such-bucket/runs"))
    assert time.monotonic() - began < 10 and not as_path("s3://no-such-bucket").exists()


def test_a_silent_endpoint_ends_within_the_limit(use_s3):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        use_s3(f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(ConfigError, match="within 8 s"):
            check_store(as_path("s3://bucket/runs"))
        assert time.monotonic() - began < 15


def test_an_endpoint_that_refuses_connections_is_named(use_s3):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        use_s3(f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(ConfigError, match="cannot be used") as caught:
            check_store(as_path("s3://bucket/runs"))
    assert "secret" not in str(caught.value)


def test_a_request_is_repeated_until_the_stated_end():
    calls = []

    def fails(times):
        def request():
            calls.append(1)
            if len(calls) <= times:
                raise OSError("503 SlowDown")
            return "done"

        return request

    retry = Retry(tries=3, seconds=60, first_pause=0.001)
    assert retry.call("Reading", fails(2)) == "done" and len(calls) == 3
    calls.clear()
    with pytest.raises(StoreError, match="failed 3 times"):
        retry.call("Reading", fails(9))
    calls.clear()
    with pytest.raises(StoreError, match="not permitted"):
        retry.call("Writing", lambda: (_ for _ in ()).throw(PermissionError("AccessDenied")))


def test_nothing_is_imported_for_local_paths():
    code = (
        "import sys, echelon; from echelon.common.storage import as_path; as_path('runs'); "
        "sys.exit('fsspec' in sys.modules and 'torch' not in sys.modules or 's3fs' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_a_spool_folder_knows_its_url(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    url = as_path("s3://bucket/runs")
    spool = spool_folder(url)
    assert spool.is_dir() and spool == spool_folder(url) and spool != spool_folder(url / "x")
    assert home_of(spool / "name" / "version_0") == url / "name/version_0"
    assert home_of(tmp_path / "other") == tmp_path / "other"
