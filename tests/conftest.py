"""Fixtures and skips for what a test may need of the machine: signals that work, a GPU, a browser, a fast disk."""

import functools
import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import torch


def pytest_configure():
    """Undo what a shell did to the signals: `make test &` in a script starts with SIGINT ignored, nohup with SIGHUP.

    Processes that tests start would inherit it, and a Ctrl-C sent to them would be lost. This also runs in the workers
    of pytest-xdist.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


SLOW_FOLDERS = {"benchmarks", "docs", "elastic", "equivalence", "examples", "faults", "launch", "ports"}
STARTS_PROCESSES = re.compile(
    r"run_ranks\(|run_program\(|launch_all\(|as_rank|two_nodes\(|subprocess\.\w+\(|os\.fork\(|devices=[2-9]\b"
)


@functools.cache
def is_slow(path):
    """Whether the tests of a file start processes, each of which takes a second or more; `make test-fast` does not."""
    folder = path.relative_to(Path(__file__).parent).parts[0]
    return folder in SLOW_FOLDERS or STARTS_PROCESSES.search(path.read_text()) is not None


def pytest_collection_modifyitems(items):
    for item in items:
        if is_slow(item.path):
            item.add_marker("slow")
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
