"""Fixtures of tests of storage: an S3 server, buckets on it, and a proxy before it that fails requests."""

import itertools

import pytest
from proxy import faulty_proxy
from server import environment, make_bucket
from server import s3_server as started

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_server():
    """The address of an S3 server, one for all tests of a process."""
    with started() as address:
        yield address


@pytest.fixture
def use_s3(monkeypatch):
    """A function that makes this process, and those that it starts, use the S3 server of an address."""

    def use(address):
        for name, value in environment(address).items():
            monkeypatch.setenv(name, value)
        _forget_clients()

    yield use
    _forget_clients()


@pytest.fixture
def bucket(s3_server, use_s3):
    """The URL of a new bucket, such as ``s3://bucket-0``, on a server that the environment names."""
    name = f"bucket-{next(_numbers)}"
    make_bucket(s3_server, name)
    use_s3(s3_server)
    return f"s3://{name}"


@pytest.fixture
def proxy(s3_server, bucket, use_s3):
    """A proxy before the server, which the environment names instead: `bucket` is reached through it."""
    with faulty_proxy(s3_server) as proxy:
        use_s3(proxy.address)
        yield proxy


def _forget_clients():
    """Have the next client read the environment again: a process keeps the one that it has."""
    from echelon.common.storage.filesystem import forget_filesystem

    forget_filesystem("s3")
