"""What goes wrong on devices ends a run with an error that says where, on all ranks, and the next one works."""

import contextlib
import fcntl
import re

import device_failures as failures
import pytest
from sweep import only_in_sweep


@pytest.mark.parametrize("where", ["forward", *only_in_sweep("backward", "step")])
def test_memory_that_runs_out_ends_the_run_and_the_next_one_works(simulated, where):
    (kind, said), steps = simulated.call(failures.out_of_memory, where)
    assert kind == "OutOfMemoryError"
    assert "simulated device 0 is out of memory" in said
    assert steps == 6


@pytest.mark.only_in_sweep  # the save that runs out of memory ends all, too
def test_memory_that_runs_out_on_one_rank_ends_all(simulated):
    kind, said = simulated.call(failures.out_of_memory_on_a_rank, "backward")
    assert kind == "OutOfMemoryError"
    assert "simulated device 1 is out of memory" in said
    assert "Raised on rank 1 of 2" in said


def test_the_largest_batch_that_fits_is_found(simulated):
    assert simulated.call(failures.found_batch_size) == 16


@pytest.mark.parametrize("strategy", ["ddp", *only_in_sweep("fsdp")])
def test_a_device_that_is_lost_ends_all_ranks_with_its_error(simulated, strategy):
    kind, said = simulated.call(failures.lost_device, strategy)
    assert kind == "RuntimeError"
    assert "simulated device 1 was lost" in said
    assert "Raised on rank 1 of 2" in said


@pytest.mark.parametrize("strategy", ["ddp", *only_in_sweep("fsdp")])
def test_ranks_with_devices_of_different_types_end_before_they_send_anything(elsewhere, strategy):
    kind, said = elsewhere.call(failures.unlike_devices, strategy)
    assert kind == "ConfigError"
    assert re.search(r"rank 0 on \S+ has \w+ \(\w+\), but rank 1 on \S+ has cpu \(gloo\)", said)
    assert "give each the same accelerator" in said


@contextlib.contextmanager
def held(folder, device):
    """Hold a device of those that have their locks in a folder, as another process that uses it does."""
    with (folder / str(device)).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize(
    ("strategy", "devices", "place"),
    [
        ("single", [1], ""),
        *only_in_sweep(("dp", [0, 1], ""), ("device_map", [0, 1], "")),
        ("ddp", 2, "Raised on rank 1 of 2"),
        *only_in_sweep(("fsdp", 3, "Raised on rank 1 of 3")),
    ],
)
def test_a_device_that_another_process_holds_ends_all_ranks_and_is_named(simulated, tmp_path, strategy, devices, place):
    with held(tmp_path, 1):
        (kind, said), steps = simulated.call(failures.with_held_devices, str(tmp_path), strategy, devices)
    assert kind == "ConfigError"
    assert re.search(r"sim:1 on \S+ cannot be used: simulated device 1 is busy or unavailable", said)
    assert "choose other devices" in said
    assert place in said
    assert steps == []


@pytest.mark.only_in_sweep  # what is held is named, above
@pytest.mark.parametrize(("strategy", "devices"), [("single", [2]), ("dp", [0, 2]), ("ddp", [0, 2])])
def test_devices_beside_one_that_is_held_train(simulated, tmp_path, strategy, devices):
    with held(tmp_path, 1):
        said, steps = simulated.call(failures.with_held_devices, str(tmp_path), strategy, devices)
    assert said == ("nothing", "")
    assert steps == [6]


@pytest.mark.parametrize("strategy", [*only_in_sweep("single"), "ddp"])
def test_memory_that_runs_out_in_a_save_ends_all_ranks_and_leaves_the_checkpoints_before(simulated, tmp_path, strategy):
    (kind, said), steps = simulated.call(failures.saved_when_full, strategy, str(tmp_path))
    assert kind == "OutOfMemoryError"
    assert re.search("simulated device . is out of memory", said)
    assert [path.name for path in tmp_path.iterdir()] == ["before"]
    assert steps == 6


@pytest.mark.only_in_sweep
@pytest.mark.parametrize("strategy", ["fsdp", "pp"])
def test_shards_and_stages_are_saved_without_memory_of_the_device(simulated, tmp_path, strategy):
    assert simulated.call(failures.saved_when_full, strategy, str(tmp_path)) == (("nothing", ""), 6)
    assert {path.name for path in tmp_path.iterdir()} == {"before", "full"}


@pytest.mark.parametrize("place", ["data set", "collate function"])
def test_samples_may_be_made_on_the_device_without_workers(simulated, place):
    assert simulated.call(failures.data_on_a_device, 0, place) == (("nothing", ""), 6)


@pytest.mark.parametrize("place", ["data set", "collate function"])
def test_a_worker_that_touches_the_device_is_an_error_that_says_so(simulated, place):
    (kind, said), steps = simulated.call(failures.data_on_a_device, 1, place)
    assert kind == "RuntimeError"
    assert "Cannot re-initialize the simulated device in a forked subprocess" in said
    assert steps == 0
