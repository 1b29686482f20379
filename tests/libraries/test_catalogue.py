"""Optimizers and modules of libraries train on each layout as in one process, or are refused by name."""

import importlib.util

import pytest
from catalogue import TITLES, found_on

LIBRARIES = ("timm", "peft", "torchao", "transformers", "torchmetrics", "lion_pytorch")
MISSING = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} are not installed; `make test-libraries` does it")
BOUND = {"transformers: output_attentions": 1e-5}
"""The largest difference of what computes a part in float32."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("catalogue", "title"), [(name, title) for name, titles in TITLES.items() for title in titles])
def test_a_catalogue_trains_as_in_one_process_or_is_refused(catalogue, title):
    faults = []
    for name, found in found_on(catalogue, title).items():
        is_refused = isinstance(found, str)
        if is_refused and "echelon.common.errors." not in found and "use strategy=" not in found:
            faults.append(f"{name} ends in an error without a name: {found[-600:]}")
        elif not is_refused and not found <= BOUND.get(name, 1e-10):
            faults.append(f"{name} differs by {found}")
    assert not faults, "\n".join(faults)
