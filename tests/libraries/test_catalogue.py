"""Optimizers and modules of libraries train on each layout as in one process, or are refused by name."""

import importlib.util

import pytest
from catalogue import TITLES, cell, documented, found_on

LIBRARIES = ("timm", "peft", "torchao", "transformers", "torchmetrics", "lion_pytorch", "pytorch_optimizer")
MISSING = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} are not installed; `make test-libraries` does it")


@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore")  # those of the libraries
@pytest.mark.parametrize(("catalogue", "title"), [(name, title) for name, titles in TITLES.items() for title in titles])
def test_a_catalogue_trains_or_is_refused_as_documented(catalogue, title):
    expected = documented(catalogue)
    found = {name: cell(name, value) for name, value in found_on(catalogue, title).items()}
    assert found == {name: expected[name, title] for name in found}
