"""Estimates compared with measurements: what each rank of a real step holds, keeps for backward and sends."""

import copy

import pytest
from as_rank import calm_down
from planned_modules import GPT, MODULES, HugeEmbedding, ViT, hardware_of, measure, misestimated, profile_of
from sweep import IS_SWEEP

from echelon import ActivationCheckpointing, ConfigError
from echelon.strategies import FSDPStrategy, ParallelStrategy
from echelon.strategies.estimate.by_strategy import estimate_step
from echelon.strategies.registry import find_strategy
from echelon.testing import run_ranks

FULL = ActivationCheckpointing(modules=lambda name, _: name.rpartition(".")[0] in ("blocks", "layers"))
STRATEGIES = {
    1: {"single": "single"},
    2: {
        "ddp": "ddp",
        "zero": "zero",
        "fsdp": "fsdp",
        "tp": ParallelStrategy(tp=2),
        "tp with sequences": ParallelStrategy(tp=2, sequence_parallel=True),
        "cp": ParallelStrategy(cp=2),
        "cp by heads": ParallelStrategy(cp=2, cp_exchange="ulysses"),
    },
    4: {"fsdp": "fsdp", "hsdp": FSDPStrategy(replicate=2), "fsdp x tp": ParallelStrategy(dp_shard=2, tp=2)},
}
CUT = {"tp": (GPT, ViT), "cp": (GPT,), "tp with sequences": (GPT,), "cp by heads": (GPT,), "fsdp x tp": (GPT,)}


def says_more(kind, setting, name, world_size):
    """Return whether a case does not repeat what others show."""
    if setting is FULL:
        return kind is GPT and (IS_SWEEP or name in ("single", "tp"))
    if kind is GPT:
        return True
    if IS_SWEEP:
        return world_size < 4 or kind is HugeEmbedding
    return world_size < 4 and name in ("single", "ddp", "fsdp")


def cases(world_size):
    """Yield each module, setting of checkpointing and strategy that is measured on a number of ranks."""
    for kind in MODULES:
        for setting in (None, FULL):
            for name in STRATEGIES[world_size]:
                is_possible = kind in CUT.get(name, (kind,))
                if is_possible and says_more(kind, setting, name, world_size):
                    yield kind, setting, name


def strategy_of(world_size, name):
    return find_strategy(copy.deepcopy(STRATEGIES[world_size][name]))()


def measured_on_ranks(world_size):
    calm_down()
    return [
        measure(kind, strategy_of(world_size, name), activation_checkpointing=setting)
        for kind, setting, name in cases(world_size)
    ]


@pytest.fixture(scope="module")
def profiles():
    return {
        (kind, setting): profile_of(kind, activation_checkpointing=setting)
        for kind in MODULES
        for setting in (None, FULL)
    }


@pytest.mark.sweep
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.only_in_sweep)])
def test_what_ranks_hold_and_send_is_what_was_estimated(world_size, profiles):
    measured_rows = measured_on_ranks(1) if world_size == 1 else run_ranks(measured_on_ranks, world_size, world_size)[0]
    hardware = hardware_of(world_size)
    wrong = []
    for (kind, setting, name), measured in zip(cases(world_size), measured_rows, strict=True):
        estimate = estimate_step(strategy_of(world_size, name), profiles[kind, setting], hardware)
        if name == "cp" and setting is None:
            # attention keeps its parts of keys and values by itself, where no hook counts them
            measured["activations"] += profiles[kind, setting].attention_bytes / world_size
        label = f"{kind.__name__}, {name} {world_size}, {'full' if setting else 'off'}"
        wrong += misestimated(label, estimate, measured)
    assert not wrong, "\n".join(wrong)


def test_a_layout_without_an_estimate_says_so(profiles):
    for strategy, said in (
        (ParallelStrategy(pp=2), "accumulate_grad_batches must be at least 2"),
        (find_strategy("device_map")(), "it places"),
    ):
        with pytest.raises(ConfigError, match=said):
            estimate_step(strategy, profiles[GPT, None], hardware_of(2 if strategy.uses_processes else 1))
