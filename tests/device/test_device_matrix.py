"""Strategies on an accelerator end where one process on the CPU does, and no step makes the host wait."""

import functools

import device_matrix
import device_waits
import pytest
from sweep import IS_SWEEP

_STAGES = ("point_to_point.py", "metrics/reduction.py")
MEETS_THE_HOST = {
    "fsdp x 2, offload": ("inner_backwards.py",),  # torch waits for gradients that the optimizer reads on the CPU
    "ps x 2 + 1 server": ("servers/",),  # servers compute on CPUs
    # stages send through host memory; where ranks agree on going on, the last stage's values come to rank 0's bar
    "pp x 2, gpipe": _STAGES,
    "pp 2 x tp 2": _STAGES,
}
"""Strategies whose steps wait since they need something on the host, and the files or folders that do."""


@pytest.fixture(scope="module")
def of_line(elsewhere):
    """Returns a function that runs a line on devices once: how far it is from one process on the CPU, and its waits."""

    @functools.cache
    def run(title):
        if (number := elsewhere.call(device_matrix.num_missing, title)) > 0:
            pytest.skip(f"needs {number} more device(s)")
        return elsewhere.call(device_matrix.results, title, timeout=200.0)

    return run


@pytest.mark.sweep
@pytest.mark.parametrize("title", device_matrix.OF_DEVICE)
def test_a_strategy_on_a_device_is_as_one_process_on_the_cpu(of_line, title):
    check(of_line(title)[0])


@pytest.mark.sweep
@pytest.mark.parametrize("title", device_matrix.OF_DEVICE)
def test_no_step_makes_the_host_wait_for_the_device(simulated, of_line, title):
    waits = of_line(title)[1]
    allowed = MEETS_THE_HOST.get(title, ())
    assert [wait for of_rank in waits for wait in of_rank if not any(place in wait for place in allowed)] == []
    assert any(waits) == bool(allowed)


def test_a_step_that_waits_is_seen_with_its_line(simulated):
    waits = simulated.call(device_waits.waits_on_purpose)
    assert len(waits) == 3
    assert all(wait.startswith("item: ") and "device_waits.py" in wait for wait in waits)


@pytest.mark.sweep
@pytest.mark.parametrize("title", ["single", *["ddp x 2", "dp x 2", "device_map x 2", "ps x 2 + 1 server"] * IS_SWEEP])
def test_an_accelerator_that_others_register_needs_no_streams_and_no_generators(plain, title):
    check(plain.call(device_matrix.results, title, timeout=200.0)[0])


@pytest.mark.parametrize("title", ["single", "ddp x 2", "fsdp x 2"])
def test_a_custom_loop_on_a_device_is_as_one_process_on_the_cpu(simulated, title):
    found = simulated.call(device_matrix.engine_differences, title, timeout=200.0)
    assert len(found) >= 2
    assert [far for far in found if not far <= 1e-12] == []


def check(found):
    """Assert that each case and rank ended as one process on the CPU did."""
    assert found
    differences = [(case, *of_rank) for case, of_ranks in found.items() for of_rank in of_ranks]
    # written such that NaN is a difference; metrics for callbacks are in float32
    assert [one for one in differences if not (one[1] <= 1e-12 and one[2] <= 1e-12 and one[3] <= 1e-6)] == []
    assert [one for one in differences if one[4]] == []
