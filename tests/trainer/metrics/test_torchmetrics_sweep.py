"""Every metric of torchmetrics has, on every layout, the value of all samples in one go."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch
from as_rank import calm_down
from small import quiet
from sweep import IS_SWEEP, dealt
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics_table import BY_BATCH, Entry, public_classes, table, taken

from echelon import ParallelStrategy, TrainModule
from echelon.testing import run_ranks

NUMBERS = (7, 13)
BATCH = 2
LAYOUTS: dict[str, tuple[int, Any]] = {
    "single": (1, lambda: "single"),
    "ddp 2": (2, lambda: "ddp"),
    "fsdp 2": (2, lambda: "fsdp"),
    "ddp 3": (3, lambda: "ddp"),
    "fsdp 3": (3, lambda: "fsdp"),
    "dp_shard 2 x tp 2": (4, lambda: ParallelStrategy(dp_shard=2, tp=2, tp_plan={"up": "colwise", "down": "rowwise"})),
}
CELLS = dealt(list(LAYOUTS), NUMBERS, (0,)) if IS_SWEEP else [("single", 7), ("ddp 3", 7)]
"""Layouts and numbers of samples."""
ENTRIES, REASONS = table()


class Measured(TrainModule):
    """Has every metric; logs those of one number, and computes the others by itself."""

    def __init__(self, entries: Mapping[str, Entry], number: int, numbers: Collection[str]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.metrics = nn.ModuleDict({name: entry.make() for name, entry in entries.items()})
        self.entries, self.numbers = entries, numbers
        self.inputs = {name: inputs_of(entry, number) for name, entry in entries.items()}
        self.found: dict[str, Any] = {}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.down(self.up(torch.ones(len(batch), 4)))
        for name, entry in self.entries.items():
            metric = self.metrics[name]
            entry.update(metric, *(taken(part, batch.tolist()) for part in self.inputs[name]))
            if name in self.numbers:
                self.log(name, metric)

    def on_validation_epoch_end(self) -> None:
        for name in self.entries:
            if name not in self.numbers:
                self.found[name] = self.metrics[name].compute()


def inputs_of(entry: Entry, number: int) -> tuple[Any, ...]:
    return entry.inputs(number, torch.Generator().manual_seed(1))


def in_one_go(entry: Entry, number: int) -> Any:
    metric = entry.make()
    entry.update(metric, *inputs_of(entry, number))
    return metric.compute()


def is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def measure(title: str, number: int, numbers: Collection[str]) -> dict[str, Any]:
    """Validate, logging the metrics of one number; return the value of each metric."""
    module = Measured(table()[0], number, numbers)
    trainer = quiet(strategy=LAYOUTS[title][1](), devices=1 if title == "single" else "auto")
    data: Any = torch.arange(number)
    (logged,) = trainer.validate(module, DataLoader(data, BATCH), verbose=False)
    return {**module.found, **logged}


def measure_all(processes: int, numbers: Mapping[int, Collection[str]]) -> dict[tuple[str, int], Any]:
    """Measure in every layout of a number of processes; in each of them."""
    calm_down()
    return {
        (title, number): measure(title, number, numbers[number])
        for title, number in CELLS
        if LAYOUTS[title][0] == processes
    }


@functools.cache
def expected_of(name: str, number: int) -> Any:
    return in_one_go(ENTRIES[name], number)


@pytest.fixture(scope="module")
def found_by() -> Any:
    """Return what each rank of a layout found; each number of processes starts once."""
    found: dict[int, Any] = {}
    numbers = {number: [n for n in ENTRIES if is_number(expected_of(n, number))] for _, number in CELLS}

    def get(title: str) -> list[dict[tuple[str, int], Any]]:
        processes = LAYOUTS[title][0]
        if processes not in found:
            found[processes] = None  # a failed start is not repeated
            found[processes] = run_ranks(measure_all, processes, processes, numbers, timeout=300)
        assert found[processes] is not None, f"the start of {processes} processes failed: see its first test"
        return found[processes]  # type: ignore[no-any-return]

    return get


def differs(found: Any, right: Any, *, is_ordered: bool) -> bool:
    """Return whether a value differs by more than rounding."""
    if is_number(right):
        found, right = float(found), float(right)
        return not (math.isclose(found, right, rel_tol=1e-4, abs_tol=1e-5) or (math.isnan(found) and math.isnan(right)))
    if not is_ordered:
        found, right = found.sort().values, right.sort().values
    try:
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5, equal_nan=True)
    except AssertionError:
        return True
    return False


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("title", "number"), CELLS)
def test_every_metric_has_the_value_of_all_samples_in_one_go(title: str, number: int, found_by: Any) -> None:
    wrong = {}
    for rank, found in enumerate(found_by(title)):
        values = found[title, number]
        assert values.keys() == ENTRIES.keys()
        for name, entry in ENTRIES.items():
            right = expected_of(name, number)
            if differs(values[name], right, is_ordered=entry.is_ordered):
                wrong[name, rank] = values[name], right
    assert not wrong


def test_every_public_metric_is_measured_or_has_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f" {len(ENTRIES)} metrics; not here: {', '.join(name for name in REASONS if name not in BY_BATCH)}")
    assert {name for _, name, _ in public_classes()} == {*ENTRIES, *REASONS}
    assert len(ENTRIES) > 150
