"""Layouts: the ways to spread a run over devices, each with its strategy and the value for a config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...strategies import (
    DDPOptions,
    DDPStrategy,
    FSDPStrategy,
    ParallelStrategy,
    ParameterServerStrategy,
    RemoteEmbedding,
    SingleDeviceStrategy,
    Strategy,
    ZeroStrategy,
)
from ...strategies.estimate.profile import Profile
from .machine import Machine


@dataclass(frozen=True)
class RunLayout:
    """One way to spread a run over the devices of a machine."""

    name: str
    make: Callable[[], Strategy]
    config: str | dict[str, Any]
    """The value of ``strategy`` in a config."""
    num_readers: int
    """How many ranks read samples of their own."""


def possible_layouts(machine: Machine, profile: Profile) -> Iterator[RunLayout]:
    """Yield the layouts that are possible for the devices, simple ones first; the module itself is checked later."""
    number, nodes = machine.num_devices, machine.num_nodes
    if number == 1:
        yield RunLayout("single", SingleDeviceStrategy, "single", 1)
        return
    yield from replica_layouts(number, profile)
    if any(isinstance(part, RemoteEmbedding) for part in profile.module.modules()):
        yield _make_class_layout("ddp, tables on a server", ParameterServerStrategy, number, dense="ddp")
    yield RunLayout("fsdp", FSDPStrategy, "fsdp", number)
    yield _make_class_layout("fsdp summing each micro-batch", FSDPStrategy, number, sync_each_micro_batch=True)
    if nodes > 1:
        yield _make_class_layout(f"hsdp of {nodes} replicas", FSDPStrategy, number, replicate=nodes)
    elif number > 2 and number % 2 == 0:
        yield _make_class_layout("hsdp of 2 replicas", FSDPStrategy, number, replicate=2)
    if not machine.is_cpu:
        yield _make_class_layout("fsdp offloaded", FSDPStrategy, number, cpu_offload=True)
    yield from _product_layouts(machine, has_sequences=profile.attention_bytes > 0)


def replica_layouts(number: int, profile: Profile) -> Iterator[RunLayout]:
    """Yield the layouts of whole modules, for a step of which this is the profile."""
    if not profile.unused or profile.is_manual:
        yield RunLayout("ddp", DDPStrategy, "ddp", number)
        yield RunLayout("zero", ZeroStrategy, "zero", number)
        return
    # DDP would wait for gradients that do not come
    yield _make_class_layout("ddp", DDPStrategy, number, find_unused_parameters=True)
    options = {"_target_": "echelon.strategies.DDPOptions", "find_unused_parameters": True}
    config = {"_target_": "echelon.strategies.ZeroStrategy", "ddp": options}
    yield RunLayout("zero", partial(ZeroStrategy, ddp=DDPOptions(find_unused_parameters=True)), config, number)


def _product_layouts(machine: Machine, *, has_sequences: bool) -> Iterator[RunLayout]:
    """Yield layouts that cut layers (within a node) or sequences, or that split blocks into stages."""
    number, degree = machine.num_devices, 2
    while machine.devices_of_node % degree == 0:
        yield _make_parallel_layout(number, tp=degree)
        yield _make_parallel_layout(number, tp=degree, sequence_parallel=True)
        if machine.num_nodes > 1 and number // degree > machine.num_nodes:
            yield _make_parallel_layout(number, dp_replicate=machine.num_nodes, tp=degree)
        if has_sequences and number % (2 * degree) == 0:
            yield _make_parallel_layout(number, cp=2, tp=degree)
        degree *= 2
    for stages in (2, 4, 8):
        if number % stages == 0:
            yield _make_parallel_layout(number, pp=stages)
        if machine.devices_of_node % 8 == 0 and number % (8 * stages) == 0:
            yield _make_parallel_layout(number, pp=stages, tp=8)
        if has_sequences and machine.devices_of_node % 2 == 0 and number % (2 * stages) == 0:
            yield _make_parallel_layout(number, pp=stages, cp=2)
    degree = 2
    while has_sequences and machine.devices_of_node % degree == 0:
        yield _make_parallel_layout(number, cp=degree)
        degree *= 2


def _make_parallel_layout(number: int, **degrees: Any) -> RunLayout:
    cut = degrees.get("pp", 1) * degrees.get("tp", 1) * degrees.get("cp", 1)
    shards = number // cut // degrees.get("dp_replicate", 1)
    named = {"dp_replicate": degrees.get("dp_replicate", 1), "fsdp": shards, **degrees}
    name = " x ".join(
        f"{axis} {named[axis]}" for axis in ("pp", "dp_replicate", "fsdp", "cp", "tp") if named.get(axis, 1) > 1
    )
    name += " with sequences" if degrees.get("sequence_parallel") else ""
    return _make_class_layout(name, ParallelStrategy, number // cut, **degrees)


def _make_class_layout(name: str, kind: type[Strategy], num_readers: int, **arguments: Any) -> RunLayout:
    config = {"_target_": f"echelon.strategies.{kind.__name__}", **arguments}
    return RunLayout(name, partial(kind, **arguments), config, num_readers)
