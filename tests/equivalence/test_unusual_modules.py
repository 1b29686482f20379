"""Modules that do what plain ones do not train as in one process, or are refused by name before the first update."""

import pytest
import torch
from once import once
from unusual_modules import LAYOUTS, alone, ends_of

pytestmark = pytest.mark.sweep

BY_TITLE = {layout.title: layout for layout in LAYOUTS}
CELLS = [(layout.title, kind) for layout in LAYOUTS for kind in layout.kinds]
SHARDED = ("fsdp x 2", "tp x 2", "cp x 2", "pp x 2", "hsdp 2 x 2", "tp 2 x fsdp 2", "pp 2 x fsdp 2")
IN_STAGES = ("pp x 2", "pp 2 x fsdp 2")
AT_ONCE = {title for title in BY_TITLE if title not in ("dp x 2", "device_map")}
SAME_SAMPLES = ("device_map", "tp x 2", "pp x 2")
"""The layouts whose ranks all read the same samples."""
REFUSED = {
    **{(title, "ties by storage"): "two tensors in the same memory" for title in AT_ONCE - {"ddp x 2"}},
    **{(title, "outside parameters"): "are not the module's" for title in AT_ONCE},
    **{(title, "a lazy layer"): "has no shape yet" for title in {*AT_ONCE, "dp x 2"}},
    **{
        (title, "functional_call of a block"): "as by torch.func.functional_call"
        for title in SHARDED
        if title != "pp x 2"
    },
    **{(title, "an embedding with max_norm"): "has max_norm=0.5" for title in BY_TITLE if title not in SAME_SAMPLES},
    **{(title, "a penalty on weights"): "A sharded parameter was used" for title in SHARDED},
    **{(title, "auxiliary losses in attributes"): "blocks.0.auxiliary" for title in IN_STAGES},
    **{(title, "forward hooks"): "Not passed between stages: collected" for title in IN_STAGES},
    **{(title, "recorded outputs"): "as a whole on one rank" for title in IN_STAGES},
    ("pp x 2", "a penalty on weights"): "A parameter of another stage has no values here",
    ("pp x 2", "early exit"): "blocks.1 of stage 1 was not called in the step",
    ("pp x 2", "gradient penalty"): "cannot compute a derivative",
    ("cp x 2", "packed sequences"): "This step ran on a part of the batch",
    ("cp x 2", "gradient penalty"): "computes derivatives inside of its step",
}
"""What the errors say for modules that a layout does not train."""
BOUND = {"mixed dtypes": 1e-6}
"""The largest allowed difference, where it is not that of float64."""


@pytest.fixture(scope="module")
def ends_with():
    """Return how the modules ended on each rank, by the number of processes; they start once."""
    return once(ends_of)


@pytest.mark.parametrize(("title", "kind"), CELLS)
def test_an_unusual_module_trains_as_in_one_process_or_is_refused(title, kind, ends_with):
    layout = BY_TITLE[title]
    ends = [end[title, kind] for end in ends_with(layout.processes)]
    errors = [end.error for end in ends if end.error]
    if (title, kind) in REFUSED:
        assert any(REFUSED[title, kind] in error for error in errors), errors
        return
    assert not errors, errors[0]
    expected = alone(layout.global_batch, kind)
    for end in ends:
        torch.testing.assert_close(end.state, expected.state, rtol=0, atol=BOUND.get(kind, 1e-12))
        assert end.loss == pytest.approx(expected.loss, rel=0, abs=1e-6)
