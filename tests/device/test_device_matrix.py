"""Strategies on an accelerator end where one process on the CPU does: weights, metrics and counts."""

import device_matrix
import pytest


@pytest.mark.parametrize("title", device_matrix.OF_DEVICE)
def test_a_strategy_on_a_device_is_as_one_process_on_the_cpu(elsewhere, title):
    if (number := elsewhere.call(device_matrix.num_missing, title)) > 0:
        pytest.skip(f"needs {number} more device(s)")
    check(elsewhere.call(device_matrix.differences, title, timeout=200.0))


@pytest.mark.parametrize("title", ["single", "dp x 2", "device_map x 2", "ddp x 2", "ps x 2 + 1 server"])
def test_an_accelerator_that_others_register_needs_no_streams_and_no_generators(plain, title):
    check(plain.call(device_matrix.differences, title, timeout=200.0))


def check(found):
    """Assert that each case and rank ended as one process on the CPU did."""
    assert found
    differences = [(case, *of_rank) for case, of_ranks in found.items() for of_rank in of_ranks]
    # written such that NaN is a difference; metrics for callbacks are in float32
    assert [one for one in differences if not (one[1] <= 1e-12 and one[2] <= 1e-12 and one[3] <= 1e-6)] == []
    assert [one for one in differences if one[4]] == []
