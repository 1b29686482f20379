"""The matrix on an accelerator: lines of the equivalence tests, with parameters, batches and collectives on devices."""

import functools
import os
import warnings
from dataclasses import astuple, replace

import simulated_device
from device_waits import waits_of_steps
from matrix import (
    ALONE,
    CASES,
    GLOBAL_BATCH,
    Line,
    attention,
    by_case,
    compare,
    is_hard,
    is_harder,
    is_hardest,
    largest,
    stages,
    train,
    train_in_own_loop,
)
from sweep import IS_SWEEP

from echelon import DeviceMapStrategy, FSDPStrategy, LocalSGDStrategy
from echelon.strategies.devices.kinds import num_devices
from echelon.testing import run_ranks


def is_dealt(case):
    """Return whether ddp and fsdp train a case: one of the two with units; in a sweep any of the harder ones."""
    return is_harder(case) and (case.units or IS_SWEEP)


def is_last(case):
    """Return whether any other strategy trains a case: the hardest; in a sweep any of the harder ones."""
    return is_harder(case) if IS_SWEEP else is_hardest(case)


DEVICE = os.environ.get("ECHELON_TEST_DEVICE", "sim")
IN_A_SWEEP = [
    attention("tp 2 x fsdp 2", 4, takes=is_hardest, tp=2, dp_shard=2),
    stages("pp 2 x tp 2", 4, tp=2),
    Line("hsdp", 4, takes=is_hardest),
    Line("local_sgd", 2, note=", warm-up", make=lambda: LocalSGDStrategy(warmup_steps=100), takes=is_last),
] * IS_SWEEP
OF_DEVICE = {
    line.title: line
    for line in (
        Line("single", takes=is_hard),
        Line("dp", devices=2, takes=is_harder),
        Line("device_map", devices=2, make=lambda: DeviceMapStrategy(MAP), takes=is_harder),
        Line("ddp", 2, takes=is_dealt),
        Line("zero", 2, takes=is_last),
        Line("fsdp", 2, takes=is_dealt),
        Line("fsdp", 2, note=", offload", make=lambda: FSDPStrategy(cpu_offload=True), takes=is_last),
        Line("ps", 2, note=" + 1 server", takes=is_last),
        Line("elastic", 2, takes=is_hardest),
        attention("tp x 2", 2, takes=is_last, tp=2),
        attention("cp x 2", 2, takes=is_hardest, network="sequences", cp=2),
        stages("pp x 2, gpipe", 2, schedule="gpipe"),
        *IN_A_SWEEP,
    )
}
MAP = {"net.2": f"{DEVICE}:1", "net.4": f"{DEVICE}:0", "": f"{DEVICE}:0"}


@functools.cache
def alone(network, case):
    """Return the result of one process on the CPU."""
    return train(case, ALONE[network], devices=1)


def num_missing(title):
    """Return how many devices a line needs beyond those that are here."""
    line = OF_DEVICE[title]
    return max(line.processes, line.devices) - num_devices(DEVICE)


def results(title):
    """Return how far each rank of a line on devices is from one process on the CPU, by case, and where each waited."""
    warnings.simplefilter("ignore")
    line = OF_DEVICE[title]
    length = {} if IS_SWEEP or line.processes == 1 else {"epochs": 1, "fewer": GLOBAL_BATCH}
    cases = [replace(case, **length) for case in line.cases if case.precision == "64-true"]
    ranks = [there(line, cases)] if line.processes == 1 else run_ranks(there, line.processes, line, cases, timeout=150)
    ends = by_case([ends for ends, _ in ranks])
    differences = {
        case.title: [astuple(compare(end, alone(line.network, case))) for end in of_ranks]
        for case, of_ranks in ends.items()
    }
    return differences, [waits for _, waits in ranks]


def there(line, cases):
    """Train cases on devices, and count the waits of another run, in one of the line's processes."""
    return train_there(line, cases), waits_of_steps(line) if simulated_device.VARIABLE in os.environ else []


def engine_differences(title):
    """Return, for each case, how far the weights of a custom loop with an `Engine` are on each rank."""
    line = OF_DEVICE[title]
    cases = [case for case in CASES if is_harder(case) and case.precision == "64-true"][:2]
    ends = [loop_there(line, cases)] if line.processes == 1 else run_ranks(loop_there, line.processes, line, cases)
    wanted = [alone("dense", case).state for case in cases]
    return [largest(end, state) for of_rank in ends for end, state in zip(of_rank, wanted, strict=True)]


def loop_there(line, cases):
    """Train cases by an `Engine` on devices, in one of the line's processes."""
    warnings.simplefilter("ignore")
    ends = [train_in_own_loop(case, line, **_where(line)) for case in cases]
    return [{name: value.cpu() for name, value in end.items()} for end in ends]


def _where(line):
    return {"accelerator": DEVICE, "devices": line.devices if line.processes == 1 else "auto"}


def train_there(line, cases):
    """Train cases on devices, in one of the line's processes."""
    warnings.simplefilter("ignore")
    where = _where(line)
    ends = {case: train(case, line, **where) for case in cases}
    for end in ends.values():
        assert end.state
        end.state.update({name: value.cpu() for name, value in end.state.items()})
    return ends
