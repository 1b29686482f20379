"""Runs one file of Lightning's own tests in this process, on Echelon or on Lightning itself; own_tests.py starts it.

Each test is one line of the results: its name, how it ended, and its first failure. Names that only the head of a test
file imports are placeholders, which raise when a test uses them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

import pytest

HARNESS = {
    "lightning.pytorch.trainer.connectors.signal_connector._SignalConnector": type(
        "_SignalConnector", (), {"_valid_signals": staticmethod(signal.valid_signals)}
    ),
    "lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver": type(
        "_ChildProcessObserver", (), {}
    ),
}
"""What the fixtures around each of Lightning's tests need, beside `destroy_process_group` and `_runif_reasons`."""


class MissingNameError(AttributeError):
    """A test has used a name that Echelon does not have."""


# --- placeholders for names that the head of a test file imports ---


def _is_at_head(tests: str) -> bool:
    """Return whether the code that asks is the head of a test file, and no function in it."""
    frame = sys._getframe(1)
    while frame is not None and (
        frame.f_code.co_filename == __file__
        or "importlib" in frame.f_code.co_filename
        or ("__module__" in frame.f_locals and "__qualname__" in frame.f_locals)  # the body of a class
    ):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(tests)


class Placeholder(type):
    """A class that may be imported and subclassed, but not used."""

    tests = ""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if _is_at_head(cls.tests):
            return cls
        raise MissingNameError(f"{cls.path} is missing")  # type: ignore[attr-defined]

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if _is_at_head(cls.tests):
            return placeholder(f"{cls.path}.{name}")
        raise MissingNameError(f"{cls.path}.{name} is missing")


def placeholder(path: str) -> Any:
    return HARNESS.get(path) or Placeholder(path.rpartition(".")[2], (), {"path": path})


class PlaceholderModule(ModuleType):
    """A module of Lightning's that Echelon does not have."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__dict__['__name__']}.{name}"
        if _is_at_head(Placeholder.tests):
            return placeholder(path)
        raise MissingNameError(f"{path} is missing")


class PlaceholderFinder(MetaPathFinder, Loader):
    """Finds the modules that the head of a test file imports and Echelon does not have."""

    def __init__(self, modules: frozenset[str], roots: Sequence[str]) -> None:
        self._modules, self._roots = modules, roots

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        is_missing = fullname.partition(".")[0] in self._roots and fullname not in self._modules
        return ModuleSpec(fullname, self, is_package=True) if is_missing and _is_at_head(Placeholder.tests) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__path__"] = []


def stand_in(tree: Path) -> None:
    """Let Echelon stand in for Lightning, and placeholders for what it does not have."""
    import torch

    import echelon.lightning
    from echelon.strategies.launch.worker import IMPORTED_FIRST

    def destroy_process_group() -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    echelon.lightning.stand_in()
    standing: Any = sys.modules["echelon.lightning.stand_in"]  # the package has a function of that name
    IMPORTED_FIRST[:] = ["own_tests_worker"]
    os.environ["OWN_TESTS_TREE"] = str(tree)
    Placeholder.tests = str(tree / "tests")
    HARNESS["lightning.fabric.utilities.distributed._destroy_dist_connection"] = destroy_process_group
    sys.meta_path.insert(0, PlaceholderFinder(standing.MODULES, standing.ROOTS))
    asked = standing.LightningNames.__getattr__

    def ask(self: Any, name: str) -> Any:
        try:
            return asked(self, name)
        except AttributeError:
            if name.startswith("__") or not _is_at_head(Placeholder.tests):
                raise
            return placeholder(f"{self.__dict__['_lightning_path']}.{name}")

    standing.LightningNames.__getattr__ = ask
    # what a test needs of the machine is decided by Lightning's own functions
    Placeholder.tests = str(tree)
    for package in ("fabric", "pytorch"):
        file = tree / f"src/lightning/{package}/utilities/testing/_runif.py"
        spec = importlib.util.spec_from_file_location(f"lightning.{package}.utilities.testing", file)
        assert spec is not None and spec.loader is not None
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    Placeholder.tests = str(tree / "tests")


# --- results ---


def line_of(text: object) -> str:
    """Return a text as one field of a line."""
    return " ".join(str(text).split())[:400]


class Recorder:
    """Writes a line when a test begins and one when it ends, so that a killed process says how far it came."""

    def __init__(self, out: TextIO, log: TextIO, done: frozenset[str]) -> None:
        self._out, self._log, self._done = out, log, done
        self._ended: dict[str, list[str]] = {}

    def _write(self, *fields: object) -> None:
        self._out.write("\t".join(map(line_of, fields)) + "\n")
        self._out.flush()

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            text = str(report.longrepr)
            self._log.write(f"==== collection\n{text}\n")
            self._write("end", "(collection)", "failed", "collect", text.strip().splitlines()[-1], "")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if name_of(item.nodeid) not in self._done]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write("start", name_of(nodeid))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        report = (yield).get_result()
        name = name_of(item.nodeid)
        if report.failed and name not in self._ended:
            error = call.excinfo
            kind = getattr(getattr(error, "type", None), "__name__", "xpass")
            said = str(getattr(error, "value", report.longrepr))
            where = ""
            for entry in getattr(error, "traceback", ()):  # the last line of the test file
                if str(entry.path) == str(item.path):
                    where = f"{entry.lineno + 1}: {entry.statement}"
            self._ended[name] = ["failed", report.when, f"{kind}: {said}", where]
            self._log.write(f"==== {name}\n{report.longreprtext}\n")
            self._log.flush()
        elif report.skipped and name not in self._ended:
            self._ended[name] = [
                "skipped",
                report.when,
                getattr(report, "wasxfail", "") or line_of(report.longrepr),
                "",
            ]

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        name = name_of(nodeid)
        self._write("end", name, *self._ended.get(name, ["passed", "", "", ""]))


def name_of(nodeid: str) -> str:
    """Return a test's name in its file, without the addresses and line ends that parameters may show."""
    return line_of(nodeid.partition("::")[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path)
    parser.add_argument("file")
    parser.add_argument("out", type=Path)
    parser.add_argument("--done", type=Path, help="a file of names that are left out, one a line")
    parser.add_argument("--timeout", type=int, default=300)
    parser.add_argument("--lightning", action="store_true", help="on Lightning itself")
    options, selection = parser.parse_known_args()
    if options.lightning:
        sys.path.insert(0, str(options.tree / "src"))
    else:
        stand_in(options.tree)
    tests = options.tree / "tests"
    paths = [str(tests), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = frozenset(options.done.read_text().splitlines() if options.done else ())
    with options.out.open("a") as out, options.out.with_suffix(".log").open("a") as log:
        config = [
            "-c",
            str(options.tree / "pyproject.toml"),
            f"--rootdir={tests}",
            "-o",
            "addopts=",
            "-q",
            "--no-header",
        ]
        plugins = ["-p", "no:cacheprovider", "-p", "no:xdist", f"--timeout={options.timeout}", "--disable-warnings"]
        asked = [*config, *plugins, f"--basetemp={os.getcwd()}/base", str(tests / "tests_pytorch" / options.file)]
        return pytest.main([*asked, *selection], plugins=[Recorder(out, log, done)])


if __name__ == "__main__":
    sys.exit(main())
