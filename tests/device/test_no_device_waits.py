"""The host does not wait for the device in a step: a strategy with its defaults only gives it work."""

import device_matrix
import device_waits
import pytest

ALL = sorted(device_matrix.OF_DEVICE)


def test_a_step_that_waits_is_seen_with_its_line(simulated):
    assert simulated.call(device_waits.wait_on_purpose) == (["item"] * 4, [True] * 4)


@pytest.mark.parametrize("title", ALL)
def test_no_step_waits(simulated, title):
    found = simulated.call(device_waits.waits, title, {})
    assert found == [[]] * len(found)
