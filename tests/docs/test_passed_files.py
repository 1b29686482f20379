"""What a batch and weights pass on their way is what docs/architecture.md says."""

import sys

import pytest
from passed_files import PAGE, WIDTH, Tracer, holds_traced, page, without_starts
from torch import nn, zeros

from echelon.strategies.distributed.nested import map_tensors


@pytest.mark.timeout(180)
def test_the_page_lists_the_files_that_a_batch_and_weights_pass(tmp_path):
    assert PAGE.read_text() == page(tmp_path), "run `python tests/docs/passed_files.py`"


def test_a_function_that_gets_a_traced_tensor_is_passed_and_others_are_not():
    for width, files in ((WIDTH, {"strategies/distributed/nested.py"}), (WIDTH + 1, set())):
        tracer = Tracer(with_callers=False)
        batch = [zeros(width)]
        before = sys.getprofile()
        sys.setprofile(tracer)
        try:
            map_tensors(lambda tensor: tensor, batch)
        finally:
            sys.setprofile(before)
        assert tracer.files == files


def test_a_module_holds_no_traced_tensor_and_what_surrounds_a_fit_is_left_out():
    assert holds_traced({"a": [zeros(2, WIDTH)]}) and not holds_traced(nn.Linear(WIDTH, 1))
    assert without_starts({"trainer/fit.py", "trainer/loop/step.py"}) == ["trainer/loop/step.py"]
