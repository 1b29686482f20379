"""What every test may ask of the machine: a GPU, a browser."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device here"))


@pytest.fixture(scope="session")
def chromium():
    """Return the path of a headless-capable browser; CI must have one."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None and os.environ.get("CI") == "true":
        pytest.fail("CI installs a browser in .ci/run, but there is no `chromium` on PATH")
    if path is None:
        pytest.skip("no browser here; `apt-get install chromium` to run this test")
    return path


@pytest.fixture
def memory_path(tmp_path):
    """Return a folder in memory, where there is one: a disk that syncs is slow for tests that save often."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
