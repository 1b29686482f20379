"""The host does not wait for the device in a step: a strategy with its defaults only gives it work."""

import device_matrix
import device_waits
import pytest

ALL = sorted(device_matrix.OF_DEVICE)
MEETS_THE_HOST = {
    "fsdp x 2, offload": "inner_backwards.py",  # torch waits for gradients that the optimizer reads on the CPU
    "ps x 2 + 1 server": "servers/",  # servers compute on CPUs
    "pp x 2, gpipe": "point_to_point.py",  # stages send through host memory
    "pp 2 x tp 2": "point_to_point.py",
}
"""Strategies whose steps wait since they need something on the host, and the file or folder that does."""


def test_a_step_that_waits_is_seen_with_its_line(simulated):
    assert simulated.call(device_waits.wait_on_purpose) == (["item"] * 4, [True] * 4)


@pytest.mark.parametrize("title", ALL)
def test_no_step_waits(simulated, title):
    found = simulated.call(device_waits.waits, title, {"gradient_clip_val": 0.1})
    allowed = MEETS_THE_HOST.get(title)
    others = [wait for of_rank in found for wait in of_rank if allowed is None or allowed not in wait]
    assert others == []
    assert any(found) == (allowed is not None)
