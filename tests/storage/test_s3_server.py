"""Tests of the S3 server, and of the proxy that fails requests: each fault is what it says it is."""

import time

import pytest
import s3fs
from proxy import Fault


@pytest.fixture
def client():
    """A client that tries nothing twice, so that a test sees each fault."""
    return s3fs.S3FileSystem(
        skip_instance_cache=True,
        use_listings_cache=False,
        config_kwargs={"retries": {"max_attempts": 0}, "read_timeout": 1},
    )


@pytest.fixture(autouse=True)
def once(monkeypatch):
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)


def test_a_bucket_keeps_what_is_put_and_a_new_one_is_empty(bucket, client):
    client.pipe_file(f"{bucket}/folder/file", b"content")
    assert client.cat_file(f"{bucket}/folder/file", start=1, end=3) == b"on"
    assert client.ls(f"{bucket}/folder") == [f"{bucket[5:]}/folder/file"]


def test_a_bucket_is_empty_at_first(bucket, client):
    assert client.ls(bucket) == []


def test_the_proxy_passes_and_counts(bucket, proxy, client):
    client.pipe_file(f"{bucket}/file", b"x" * 1000)
    proxy.reset_counts()
    assert client.cat_file(f"{bucket}/file", start=100, end=300) == b"x" * 200
    (request,) = (request for request in proxy.requests if request.method == "GET")
    assert (request.status, request.received, request.target) == (206, 200, f"/{bucket[5:]}/file")


@pytest.mark.parametrize("status", [500, 503])
def test_a_status_fails_the_request_that_is_named(bucket, proxy, client, status):
    proxy.fail(Fault("status", status), nth=1, matches=lambda request: request.method == "PUT")
    client.pipe_file(f"{bucket}/first", b"1")
    with pytest.raises(OSError, match="by the proxy"):
        client.pipe_file(f"{bucket}/second", b"2")
    client.pipe_file(f"{bucket}/third", b"3")
    assert sorted(client.ls(bucket)) == [f"{bucket[5:]}/first", f"{bucket[5:]}/third"]


def test_a_reset_connection_never_reaches_the_server_and_a_lost_answer_has(bucket, proxy, client):
    for kind, exists in (("reset", False), ("lost", True)):
        proxy.heal()
        # aiohttp asks once more by itself
        proxy.fail(Fault(kind), times=10, matches=lambda request: request.method == "PUT")
        with pytest.raises(Exception, match=r"[Cc]onnect"):
            client.pipe_file(f"{bucket}/{kind}", b"1")
        assert client.exists(f"{bucket}/{kind}") is exists


def test_a_truncated_body_and_a_stalled_answer_are_errors(bucket, proxy, client):
    client.pipe_file(f"{bucket}/file", b"x" * 1000)
    proxy.fail(Fault("truncate"), matches=lambda request: request.method == "GET")
    with pytest.raises(Exception, match=r"payload|closed|Content"):
        client.cat_file(f"{bucket}/file")
    proxy.heal()
    proxy.fail(Fault("stall"), matches=lambda request: request.method == "GET")
    start = time.monotonic()
    with pytest.raises(Exception, match=r"[Tt]ime"):
        client.cat_file(f"{bucket}/file")
    assert time.monotonic() - start < 60
    proxy.heal()
    assert len(client.cat_file(f"{bucket}/file")) == 1000
