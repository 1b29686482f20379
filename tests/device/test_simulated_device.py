"""The simulated accelerator computes as the CPU does, and shows the mistakes that only an accelerator shows."""

import device_properties as properties


def test_it_computes_as_the_cpu_does_on_each_of_its_devices(simulated):
    assert max(simulated.call(properties.adamw_as_on_the_cpu)) <= 1e-14


def test_a_copy_to_the_host_is_garbage_until_somebody_waits(simulated):
    assert simulated.call(properties.copies_to_the_host) == [(False, [3.0, 3.0])] * 3


def test_a_pinned_buffer_that_is_reused_too_early_is_seen(simulated):
    assert simulated.call(properties.pinned_sources) == [[5.0, 5.0], [0.0, 0.0]]


def test_a_missing_wait_between_streams_is_seen(simulated):
    unordered, ordered = simulated.call(properties.side_streams)
    assert unordered != [2.0, 2.0]
    assert ordered == [2.0, 2.0]


def test_a_kernel_runs_late_and_what_it_reads_must_be_there_until_then(simulated):
    found = simulated.call(properties.late_kernels)
    right = {"result": [3.0] * 64, "changed": [1.0] * 64, "freed": [8.0] * 64}
    assert {name: with_it for name, (_, with_it) in found.items()} == right
    for name, (without, _) in found.items():
        assert without != right[name], name


def test_an_early_copy_takes_what_is_there_before_a_kernel_that_it_does_not_wait_for(simulated):
    without, with_it = simulated.call(properties.early_copies)
    assert without != [2.0] * 3
    assert with_it == [2.0] * 3


def test_the_device_reads_what_it_wrote_to_the_host_before_the_host_can(simulated):
    assert simulated.call(properties.there_and_back) == ([5.0] * 3, False)


def test_a_missing_wait_between_computation_and_communication_is_seen(simulated):
    for before, after in simulated.call(properties.communication):
        assert before != [6.0] * 3
        assert after == [6.0] * 3


def test_memory_that_is_freed_while_another_stream_uses_it_is_seen_unless_it_was_recorded(simulated):
    assert simulated.call(properties.freed_memory) == [False, True]


def test_each_wait_of_the_host_is_counted_with_the_line_that_caused_it(simulated):
    waiting, not_waiting = simulated.call(properties.counted_waits)
    assert set(map(tuple, waiting.values())) == {(True,)}, waiting
    assert [name for name, waits in not_waiting.items() if waits] == []


def test_devices_have_generators_of_their_own(simulated):
    found = simulated.call(properties.generators)
    assert found == dict.fromkeys(found, True)


def test_a_generator_of_another_device_is_refused(simulated):
    assert "device type for generator but found 'cpu'" in simulated.call(properties.wrong_generator)


def test_autocast_casts_for_its_own_type_of_device_only(simulated):
    assert simulated.call(properties.autocast_dtypes) == ["torch.bfloat16", "torch.float32", "torch.float32"]


def test_memory_is_counted_and_limited(simulated):
    added, peak, left, said = simulated.call(properties.memory)
    assert (added, left) == (1 << 20, 0)
    assert peak >= 1 << 20
    assert "out of memory" in said


def test_a_fork_cannot_use_what_its_parent_has_initialized(simulated):
    assert "Cannot re-initialize the simulated device in a forked subprocess" in simulated.call(properties.forked)


def test_it_is_known_to_torch_by_its_name(simulated):
    assert simulated.call(properties.known_as) == ("sim", "sim", "simccl", 4)
