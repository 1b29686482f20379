"""Fixtures and skips for what a test may need from the machine: working signals, a GPU, a browser, a fast disk."""

import functools
import gc
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
from sweep import IS_SWEEP


def pytest_configure():
    """Undo what a shell did to the signals: `make test &` in a script starts with SIGINT ignored, nohup with SIGHUP.

    Processes that tests start would inherit it, and a Ctrl-C sent to them would be lost. This also runs in the workers
    of pytest-xdist.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


# asks NVML: tests fork, and a process that has asked CUDA itself spoils it for its children
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
PRETENDS_GPU = os.environ.get("GPU_TESTS_ON") == "cpu"

SLOW_FOLDERS = {
    *(
        "benchmarks",
        "device",
        "docs",
        "elastic",
        "equivalence",
        "examples",
        "faults",
        "gpu",
        "launch",
        "ports",
        "weights",
    )
}
WAITING = ("elastic", "launch", "strategies/launch")
COMPUTING = ("equivalence", "faults", "trainer/tour", "benchmarks", "examples", "weights")
"""Folders whose files take a minute; in some of them, processes mostly wait for each other."""
STARTS_PROCESSES = re.compile(
    r"run_ranks\(|run_program\(|Program\(|launch_all\(|as_rank|two_nodes\(|subprocess\.\w+\(|os\.fork\(|devices=[2-9]\b"
)


@functools.cache
def is_slow(path):
    """Whether the tests of a file start processes, each of which takes a second or more; `make test-fast` does not."""
    folder = path.relative_to(Path(__file__).parent).parts[0]
    return folder in SLOW_FOLDERS or STARTS_PROCESSES.search(path.read_text()) is not None


def in_turn(paths):
    """Return files in the order in which pytest-xdist hands them out: no worker may get a long one last.

    Those that wait alternate with those that compute, so that four workers keep two cores busy.
    """
    tests, slow = Path(__file__).parent, [path for path in paths if is_slow(path)]
    waiting, computing = (
        [path for folder in folders for path in slow if tests / folder in path.parents]
        for folders in (WAITING, COMPUTING)
    )
    long = [path for pair in zip_longest(waiting, computing) for path in pair if path is not None]
    return [*dict.fromkeys([*long, *slow, *paths])]


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep what the test files import, 800,000 objects, out of later searches for garbage: each would take .5 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_itemcollected(item):
    if is_slow(item.path):
        item.add_marker("slow")
    if item.get_closest_marker("only_in_sweep"):
        item.add_marker("sweep")


@pytest.hookimpl(trylast=True)  # after `-m` has left some of them out
def pytest_collection_modifyitems(config, items):
    if not IS_SWEEP:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("only_in_sweep")])
        items[:] = [item for item in items if not item.get_closest_marker("only_in_sweep")]
    places = {path: place for place, path in enumerate(in_turn(dict.fromkeys(item.path for item in items)))}
    items.sort(key=lambda item: places[item.path])
    is_mixed = not all(item.get_closest_marker("gpu") for item in items)
    for item in items:
        if item.get_closest_marker("gpu") and not (NUM_GPUS or PRETENDS_GPU):
            item.add_marker(pytest.mark.skip(reason="torch finds no CUDA device here"))
        elif item.get_closest_marker("gpu") and NUM_GPUS and is_mixed:
            # torch counts devices once, for the first backward: where they are hidden then, it finds none afterwards
            item.add_marker(pytest.mark.skip(reason="other tests hide CUDA from this process; run these by -m gpu"))
        if item.get_closest_marker("multigpu") and NUM_GPUS < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs 2 CUDA devices, found {NUM_GPUS}"))


def pytest_collection_finish(session):
    """Have the fork server of this session import once what ranks of its tests would each import.

    It starts with what the first test needs, and each rank of a later one imports the rest. A session of few files
    starts it with pytest alone, which the helpers of most tests import. The name is that of a module of the package:
    the fork server does not have the folder of the helpers on its path, and leaves out in silence what it cannot find.
    """
    slow = [path for path in dict.fromkeys(item.path for item in session.items) if is_slow(path)]
    is_large = len(slow) > 20 or any(re.search("torchmetrics|transformers", path.read_text()) for path in slow)
    multiprocessing.set_forkserver_preload(["echelon.tests.helpers.imported_for_ranks" if is_large else "pytest"])


@pytest.fixture(autouse=True)
def kept_path(monkeypatch):
    """Undo what a test, or a command that it runs in this process, adds to the places that Python imports from.

    The root of this project holds a folder `lightning`: with it on the path, no later test finds Lightning.
    """
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture(autouse=True)
def hidden_gpus(request, monkeypatch):
    """Hide CUDA from tests that are not marked `gpu`, and from their processes: they are about the CPU."""
    if NUM_GPUS and not request.node.get_closest_marker("gpu"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


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
    """Return a folder in memory, if there is one: a disk that syncs is slow for tests that save often."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
