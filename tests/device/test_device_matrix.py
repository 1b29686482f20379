"""Strategies on an accelerator end where one process on the CPU does: weights, metrics and counts."""

import device_matrix
import pytest


@pytest.mark.parametrize("title", device_matrix.OF_DEVICE)
def test_a_strategy_on_a_device_is_as_one_process_on_the_cpu(elsewhere, title):
    found = elsewhere.call(device_matrix.differences, title, timeout=200.0)
    assert found
    differences = [(case, *of_rank) for case, of_ranks in found.items() for of_rank in of_ranks]
    # written such that NaN is a difference; metrics for callbacks are in float32
    assert [one for one in differences if not (one[1] <= 1e-12 and one[2] <= 1e-12 and one[3] <= 1e-6)] == []
    assert [one for one in differences if one[4]] == []
