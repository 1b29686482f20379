"""Estimates of further kinds of modules, compared with what the ranks of a real step hold, keep and send."""

from dataclasses import replace

import pytest
from as_rank import calm_down
from other_modules import Bags, ByHand, Dropped, Experts, LoRA, Strided, Tagger, TiedGPT
from planned_modules import hardware_of, measure, misestimated, profile_of
from sweep import IS_SWEEP, dealt

from echelon.strategies import DDPOptions, DDPStrategy, FSDPStrategy, SingleDeviceStrategy, ZeroStrategy
from echelon.strategies.estimate.by_strategy import estimate_step
from echelon.testing import run_ranks

NUM_MICRO_BATCHES = 3
REPLICAS = {"ddp": DDPStrategy, "zero": ZeroStrategy}
PARTLY_USED = {
    "ddp": lambda: DDPStrategy(find_unused_parameters=True),
    "zero": lambda: ZeroStrategy(ddp=DDPOptions(find_unused_parameters=True)),
}
SHARDS = {"fsdp": FSDPStrategy, "fsdp, gathered once": lambda: FSDPStrategy(reshard_after_forward=False)}
KINDS = (Tagger, Strided, TiedGPT, LoRA, Experts, Bags, ByHand, Dropped)

ON_TWO = {
    *dealt([kind for kind in KINDS if kind is not Bags], [*REPLICAS, *SHARDS], [0, 2]),
    (Bags, "ddp"),
    (Bags, "zero"),
}
"""Modules and strategies that are measured on two ranks, where not all are."""


def cases(num_ranks):
    """Yield each module with the names and makers of strategies, and the micro-batches of a step."""
    for kind in KINDS:
        replicas = PARTLY_USED if kind is Experts else REPLICAS
        strategies = {"single": SingleDeviceStrategy} if num_ranks == 1 else {**replicas, **SHARDS}
        for name, make in strategies.items():
            if not IS_SWEEP and num_ranks > 1 and (kind, name) not in ON_TWO:
                continue
            if (kind is not Bags or name not in SHARDS) and (num_ranks < 4 or kind in (Experts, Bags)):
                yield kind, name, make, 1
                if kind in (Strided, Bags) and name in ("single", "ddp"):
                    yield kind, name, make, NUM_MICRO_BATCHES


def measured_on_ranks(num_ranks):
    calm_down()
    return [measure(kind, make(), accumulate_grad_batches=number) for kind, _, make, number in cases(num_ranks)]


@pytest.mark.sweep
@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(4, marks=pytest.mark.only_in_sweep)])
def test_what_ranks_hold_and_send_is_what_was_estimated(num_ranks):
    rows = (
        measured_on_ranks(1) if num_ranks == 1 else run_ranks(measured_on_ranks, num_ranks, num_ranks, timeout=900)[0]
    )
    profiles = {kind: profile_of(kind) for kind in KINDS}
    wrong = []
    for (kind, name, make, number), measured in zip(cases(num_ranks), rows, strict=True):
        estimate = estimate_step(make(), replace(profiles[kind], num_micro_batches=number), hardware_of(num_ranks))
        wrong += misestimated(f"{kind.__name__}, {name} {num_ranks}, {number} micro-batches", estimate, measured)
    assert not wrong, "\n".join(wrong)
