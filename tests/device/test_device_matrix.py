"""Strategies on an accelerator end where one process on the CPU does: weights, metrics and counts."""

import device_matrix
import pytest


@pytest.mark.parametrize("title", device_matrix.OF_DEVICE)
def test_a_strategy_on_a_device_is_as_one_process_on_the_cpu(elsewhere, title):
    found = elsewhere.call(device_matrix.differences, title, timeout=200.0)
    assert found
    assert {case: difference for case, difference in found.items() if max(difference[:2]) > 1e-12} == {}
    assert {case: difference for case, difference in found.items() if difference[2] > 1e-6 or difference[3]} == {}
