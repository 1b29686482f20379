"""Machine: what a process on the CPU has for tensors, and how much of it stays free."""

import math

import pytest
import torch
from torch import nn

from echelon.strategies import Hardware
from echelon.trainer.planning.machine import Machine, memory_of_host, this_machine

CPUS = Hardware.of("cpu", 2, 1)


@pytest.mark.parametrize(
    ("name", "value", "margin"),
    [
        ("OTHER", "1", 0.25),
        ("MALLOC_MMAP_THRESHOLD_", "262144", 0.05),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=262144", 0.05),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1", 0.25),
    ],
)
def test_more_stays_free_where_freed_memory_is_kept(monkeypatch, name, value, margin):
    for variable in ("MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, value)
    assert this_machine(CPUS).margin == margin


def test_a_worker_need_not_become_one():
    before, after = this_machine(CPUS), this_machine(CPUS, is_worker=True)
    assert after.memory - before.memory == pytest.approx(80e6, abs=0.02 * memory_of_host())
    assert after.memory < memory_of_host() / 2


def test_each_axis_after_the_first_takes_memory_where_forward_communicates():
    machine = Machine(num_devices=4, memory=1e9, is_cpu=True, beside_collectives=60e6, beside_axis=75e6)
    assert machine.available({"dp_replicate": 4}, forward_is_collective=False) == 1e9
    assert machine.available({"dp_shard": 4}, forward_is_collective=True) == 1e9 - 60e6
    assert machine.available({"tp": 4}, forward_is_collective=True) == 1e9 - 135e6
    assert machine.available({"dp_shard": 2, "tp": 2, "pp": 2}, forward_is_collective=True) == 1e9 - 210e6
    assert Machine(num_devices=4, memory=1e6, beside_collectives=2e6).available({}, forward_is_collective=True) == 0


def test_the_module_counts_as_if_it_took_nothing_under_a_limit(monkeypatch):
    monkeypatch.setattr("echelon.trainer.planning.machine.memory_of_process", lambda: 1e9)
    monkeypatch.setattr("echelon.trainer.planning.machine.memory_of_host", lambda: math.inf)
    module = nn.Linear(1000, 1000, bias=False, dtype=torch.float64)
    assert this_machine(CPUS, module).memory - this_machine(CPUS).memory == 8e6
    assert this_machine(CPUS, is_worker=True).memory == 1e9 - 40e6


@pytest.mark.parametrize(
    ("prefix", "limit", "usage", "count"),
    [
        ("", "memory.max", "memory.current", "inactive_file"),
        ("memory/", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_a_container_has_what_its_limit_leaves(tmp_path, prefix, limit, usage, count):
    folder = tmp_path / prefix
    folder.mkdir(exist_ok=True)
    assert memory_of_host(tmp_path) > 1e9
    (folder / limit).write_text("50000000\n")
    (folder / usage).write_text("30000000\n")
    assert memory_of_host(tmp_path) == 20e6
    (folder / "memory.stat").write_text(f"anon 20000000\n{count} 8000000\n")
    assert memory_of_host(tmp_path) == 28e6
    (folder / limit).write_text("max\n")
    assert memory_of_host(tmp_path) > 1e9
