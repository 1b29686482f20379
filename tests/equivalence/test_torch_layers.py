"""Layers and losses of torch train on each layout as in one process, or are refused by name."""

import functools

import pytest
import torch
from once import once
from sweep import IS_SWEEP, dealt
from torch_layers import ROWS
from unusual_modules import LAYOUTS, End, Layout, train, train_all

from echelon.testing import run_ranks

pytestmark = pytest.mark.sweep

NUM_SAMPLES = 7 if IS_SWEEP else 3
"""The last batch has one sample, which one of the ranks gets."""
BY_TITLE = {layout.title: layout for layout in LAYOUTS if layout.processes < 3 and not layout.title.startswith("cp")}
OF_THE_BATCH = {("dp x 2", "Embedding, by frequency")}
"""What is computed from all of a batch, which this layout divides."""
FAIL_ON_ONE = {("pp x 2", "TransformerDecoder")}
"""What is refused on one stage while the other waits for it: a value that all layers take does not cross the cut."""
CELLS = [
    (title, name)
    for name, title in dealt(list(ROWS), list(BY_TITLE), (0,))
    if (title, name) not in OF_THE_BATCH | FAIL_ON_ONE
]
REFUSED = {(title, "Embedding, sparse"): "sparse" for title in ("fsdp x 2", "tp x 2", "pp x 2", "ps x 2 + 1 server")}
"""What the errors say for layers that a layout does not train."""


def built(name):
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return ROWS[name]()


def ends_of(processes):
    """Return how the modules ended on each layout of a number of processes, on each rank."""
    modules = {(title, name): built(name) for title, name in CELLS if BY_TITLE[title].processes == processes}
    if processes == 1:
        return [train_all(1, modules, NUM_SAMPLES)]
    return run_ranks(train_all, processes, processes, modules, NUM_SAMPLES, timeout=420)


@functools.cache
def alone(global_batch: int, name: str) -> End:
    """Return how a module ends in one process that takes the same steps."""
    return train(Layout("single", 1, lambda: "single", global_batch, devices=1), built(name), NUM_SAMPLES)


@pytest.fixture(scope="module")
def ends_with():
    return once(ends_of)


@pytest.mark.parametrize(("title", "name"), CELLS)
def test_a_layer_of_torch_trains_as_in_one_process_or_is_refused(title, name, ends_with):
    layout = BY_TITLE[title]
    ends = [end[title, name] for end in ends_with(layout.processes)]
    errors = [end.error for end in ends if end.error]
    if (title, name) in REFUSED:
        assert len(errors) == len(ends), ends
        assert all(REFUSED[title, name] in error for error in errors), errors
        return
    assert not errors, errors[0]
    expected = alone(layout.global_batch, name)
    assert expected.error is None, expected.error
    for end in ends:
        torch.testing.assert_close(end.state, expected.state, rtol=0, atol=1e-12)
