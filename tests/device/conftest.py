"""Processes whose torch has the simulated accelerator, or the real one that ECHELON_TEST_DEVICE names."""

import os
import sys
from pathlib import Path

import building
import pytest
from elsewhere import Elsewhere

sys.path.append(str(Path(__file__).parents[1] / "equivalence"))  # for `matrix`

REAL = os.environ.get("ECHELON_TEST_DEVICE")


def start(folder, name, options=""):
    """Return a process in which the accelerator has a name."""
    if REAL:
        return Elsewhere(folder / f"{REAL}.log", [], {"ECHELON_TEST_DEVICE": REAL})
    if tool := building.missing_tool():
        pytest.skip(f"the simulated accelerator needs {tool} to be built")
    built = building.build()
    variables = {
        "ECHELON_SIMULATED": f"{name}={building.library_in(built)}{options}",
        "ECHELON_TEST_DEVICE": name,
    }
    return Elsewhere(folder / f"{name}.log", [built / "site"], variables)


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory):
    """A process whose torch has the accelerator ``sim``, with all that an accelerator can have."""
    process = start(tmp_path_factory.mktemp("device"), "sim")
    yield process
    process.close()


@pytest.fixture(scope="session")
def plain(tmp_path_factory):
    """A process whose torch has an accelerator of another name, without streams or generators for programs."""
    if REAL:
        pytest.skip("the accelerator is a real one")
    process = start(tmp_path_factory.mktemp("device"), "toy", "=plain")
    yield process
    process.close()


@pytest.fixture
def simulated(elsewhere):
    """The same, for tests of the simulated accelerator itself."""
    if REAL:
        pytest.skip("the accelerator is a real one")
    return elsewhere
