"""What goes wrong on devices ends a run with an error that says where, on all ranks, and the next one works."""

import re

import device_failures as failures
import pytest


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_memory_that_runs_out_ends_the_run_and_the_next_one_works(simulated, where):
    (kind, said), steps = simulated.call(failures.out_of_memory, where)
    assert kind == "OutOfMemoryError"
    assert "simulated device 0 is out of memory" in said
    assert steps == 6


def test_memory_that_runs_out_on_one_rank_ends_all(simulated):
    kind, said = simulated.call(failures.out_of_memory_on_a_rank, "backward")
    assert kind == "OutOfMemoryError"
    assert "simulated device 1 is out of memory" in said
    assert "Raised on rank 1 of 2" in said


def test_the_largest_batch_that_fits_is_found(simulated):
    assert simulated.call(failures.found_batch_size) == 16


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_device_that_is_lost_ends_all_ranks_with_its_error(simulated, strategy):
    kind, said = simulated.call(failures.lost_device, strategy)
    assert kind == "RuntimeError"
    assert "simulated device 1 was lost" in said
    assert "Raised on rank 1 of 2" in said


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_with_devices_of_different_types_end_before_they_send_anything(elsewhere, strategy):
    kind, said = elsewhere.call(failures.unlike_devices, strategy)
    assert kind == "ConfigError"
    assert re.search(r"rank 0 on \S+ has \w+ \(\w+\), but rank 1 on \S+ has cpu \(gloo\)", said)
    assert "give each the same accelerator" in said


def test_a_data_set_may_make_samples_on_the_device_without_workers(simulated):
    assert simulated.call(failures.data_on_a_device, 0) == (("nothing", ""), 6)


def test_a_worker_that_touches_the_device_is_an_error_that_says_so(simulated):
    (kind, said), steps = simulated.call(failures.data_on_a_device, 1)
    assert kind == "RuntimeError"
    assert "Cannot re-initialize the simulated device in a forked subprocess" in said
    assert steps == 0
