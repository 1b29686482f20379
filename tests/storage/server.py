"""An S3 server on loopback: moto's, in a process of its own, which ends with the tests. Also a program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

KEY, SECRET = "AKIAECHELONTESTKEY00", "echelon-secret-that-must-stand-nowhere"
"""Credentials of tests: moto takes any."""

_SECONDS_TO_END = 30


@contextmanager
def s3_server(host: str = "127.0.0.1", *buckets: str, lead: Sequence[str] = ()) -> Iterator[str]:
    """Yield the address of a new server, such as ``http://127.0.0.1:40123``.

    Args:
        host: the address on which it listens.
        buckets: those that it has.
        lead: what stands before its command line, such as ``ip netns exec NAME``.
    """
    with subprocess.Popen(
        [*lead, sys.executable, str(Path(__file__).resolve()), host, *buckets],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "PYTHONWARNINGS": "ignore"},
    ) as process:
        try:
            address = process.stdout.readline().strip()
            assert address, "moto's server did not start; run python tests/storage/server.py to see why"
            yield address
        finally:
            process.kill()
            process.wait(_SECONDS_TO_END)


def environment(address: str) -> dict[str, str]:
    """Return the variables by which clients of S3 find a server and sign what they ask of it."""
    return {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        # what a machine of its own might tell
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def make_bucket(address: str, name: str) -> None:
    """Create a bucket without a client of S3: one would keep the address that it was first given."""
    import urllib.request

    request = urllib.request.Request(f"{address}/{name}", method="PUT")
    with urllib.request.urlopen(request, timeout=_SECONDS_TO_END) as answer:
        assert answer.status == 200


def _serve(host: str, *buckets: str) -> None:
    import threading

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    server = make_server(host, 0, DomainDispatcherApplication(create_backend_app), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://{host}:{server.server_port}"
    for bucket in buckets:
        make_bucket(address, bucket)
    print(address, flush=True)
    sys.stdin.read()  # ends when the tests do, also if they are killed
    os._exit(0)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
