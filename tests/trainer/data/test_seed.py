"""Seeding is reproducible everywhere, derived seeds are distinct and fixed, generator states round-trip exactly."""

import json
import math
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from echelon.common.errors import ConfigError
from echelon.trainer.data.generators import GENERATORS, Generators, MappedGenerators
from echelon.trainer.data.seed import (
    RngStream,
    capture_rng,
    derive_seed,
    isolated_rng,
    restore_rng,
    seed_everything,
    seed_generators,
)


def draw():
    return random.random(), random.gauss(), float(np.random.rand()), float(np.random.randn()), torch.rand(3).tolist()


class Draws(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(()))], dtype=torch.float64)


def test_the_same_seed_gives_the_same_draws_of_python_numpy_and_torch():
    assert seed_everything(7) == 7
    first = draw()
    seed_everything(7)
    assert draw() == first
    seed_everything(8)
    assert draw() != first


def test_no_seed_means_zero():
    assert seed_everything() == 0
    first = draw()
    seed_everything(0)
    assert draw() == first


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "3", True])
def test_an_impossible_seed_is_named_with_its_range(seed):
    with pytest.raises(ConfigError, match=r"must be an integer from 0 to 4294967295") as caught:
        seed_everything(seed)
    assert repr(seed) in str(caught.value)


def test_the_seed_is_told_only_if_verbose(caplog):
    caplog.set_level("INFO")
    seed_everything(3, verbose=False)
    assert not caplog.records
    seed_everything(3)
    assert "Seed set to 3" in caplog.text


def test_every_library_is_seeded_in_workers_of_loaders_too():
    def rows():
        seed_everything(5, workers=True)
        return torch.cat(list(DataLoader(Draws(), num_workers=2)))

    first = rows()
    assert torch.equal(rows(), first)
    assert len(first.unique()) == first.numel()


def test_derived_seeds_are_fixed_for_all_time_and_fit_64_bits():
    assert derive_seed(0) == 0xE220A8397B1DCDAF  # the first output of SplitMix64 seeded with 0 (Vigna's reference)
    assert derive_seed(42, 3, 1000) == derive_seed(42, 3, 1000)
    assert 0 <= derive_seed(2**64 - 1, 2**63, -1) < 2**64


def test_derived_seeds_of_neighbouring_places_are_distinct_and_differ_in_half_their_bits():
    seeds = {derive_seed(seed, epoch, index) for seed in range(8) for epoch in range(8) for index in range(256)}
    assert len(seeds) == 8 * 8 * 256
    flips = [(derive_seed(1, 2, index) ^ derive_seed(1, 2, index + 1)).bit_count() for index in range(2000)]
    assert abs(sum(flips) / len(flips) - 32) < 0.5
    assert derive_seed(1, 2, 3) != derive_seed(1, 3, 2) != derive_seed(2, 1, 3)


def test_a_captured_state_restores_every_stream_exactly_even_through_json_and_tensors():
    seed_everything(11)
    draw()  # leaves a cached normal in Python's and in NumPy's generator
    state = capture_rng()
    tensors = [state["python"]["state"], state["numpy"]["state"], state["torch"]]
    expected = draw(), draw()
    plain = {
        "python": json.loads(json.dumps({**state["python"], "state": None})),
        "numpy": json.loads(json.dumps({**state["numpy"], "state": None})),
    }
    python, numpy, cpu = (tensor.clone() for tensor in tensors)
    seed_everything(12)
    restore_rng(
        {"python": {**plain["python"], "state": python}, "numpy": {**plain["numpy"], "state": numpy}, "torch": cpu}
    )
    assert (draw(), draw()) == expected


def test_a_state_that_lies_at_an_odd_address_is_restored_too():
    seed_everything(13)
    state = capture_rng()
    expected = torch.rand(3)
    shifted = torch.empty(state["torch"].numel() + 1, dtype=torch.uint8)[1:]
    shifted.copy_(state["torch"])
    restore_rng({**state, "torch": shifted})
    assert torch.equal(torch.rand(3), expected)


def test_a_state_without_numpy_leaves_numpy_alone():
    seed_everything(1)
    state = {name: value for name, value in capture_rng().items() if name != "numpy"}
    seed_everything(2)
    expected = np.random.get_state()[1].copy()
    restore_rng(state)
    assert (np.random.get_state()[1] == expected).all()
    assert torch.equal(torch.get_rng_state(), state["torch"])


def test_what_is_drawn_in_isolation_leaves_the_streams_outside_untouched():
    seed_everything(21)
    draw()
    state = capture_rng()
    expected = draw()
    restore_rng(state)

    def fail():
        with isolated_rng():
            seed_everything(99)
            draw()
            raise KeyError("an error inside changes nothing")

    with pytest.raises(KeyError):
        fail()
    assert draw() == expected


def test_a_stream_goes_on_where_it_was_left_and_does_not_touch_the_streams_outside():
    def outside():
        return random.random(), float(np.random.rand()), torch.rand(3).tolist()

    seed_everything(41)
    alone = [outside() for _ in range(3)]
    seed_everything(41)
    first, second = RngStream(2**63 + 5), RngStream(6)
    inside, mixed = [], []
    for _ in range(3):
        mixed.append(outside())
        with first:
            inside.append(draw())
            with second:
                inside.append(draw())
    assert mixed == alone

    first, second = RngStream(2**63 + 5), RngStream(6)
    again = []
    for _ in range(3):
        with second:
            again.append(draw())
    for index in range(3):
        with first:
            again.insert(2 * index, draw())
    assert inside == again
    assert len(set(map(str, inside))) == 6


def test_quick_seeding_starts_the_same_stream_every_time_from_64_bits():
    seed_generators(2**64 - 1)
    first = draw()
    seed_generators(2**64 - 1)
    assert draw() == first


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_state_restores_the_streams_of_cuda_devices():
    seed_everything(31)
    torch.rand(1, device="cuda")
    state = capture_rng()
    expected = torch.rand(5, device="cuda")
    seed_everything(32)
    restore_rng(state)
    assert torch.equal(torch.rand(5, device="cuda"), expected)


def test_quick_seeding_gives_each_library_numbers_of_its_own():
    rows = []
    for place in range(2000):
        seed_generators(derive_seed(3, place))
        rows.append([random.random() for _ in range(4)] + np.random.rand(4).tolist() + torch.rand(4).tolist())
    correlations = np.corrcoef(np.array(rows).T) - np.eye(12)
    assert abs(correlations).max() < 5 / math.sqrt(2000)
    seed_generators(5)
    words = [
        {random.getrandbits(32) for _ in range(3000)},
        set(np.random.randint(0, 2**32, 3000, dtype=np.uint64).tolist()),
        set(torch.empty(3000, dtype=torch.int64).random_(0, 2**32 - 1).tolist()),
    ]
    assert len(set.union(*words)) > 3 * 3000 - 30
    assert all(len(own) > 2990 for own in words)


def test_quick_seeding_follows_another_generator_of_numpy():
    seed_generators(7)
    expected = random.random(), np.random.rand(), random.gauss()
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937(1))
    try:
        random.gauss()
        seed_generators(7)
        assert (random.random(), np.random.rand(), random.gauss()) == expected
    finally:
        np.random.set_bit_generator(before)


# --- how generators are reached ---

WAYS = {"memory": MappedGenerators, "public functions": Generators}


def many_draws():
    """An odd number of normals, every second of which is kept for the next call, and numbers of many words."""
    normals = random.gauss(), float(np.random.randn()), torch.randn((), dtype=torch.float64).item()
    return *draw(), *normals, random.getrandbits(70_000), np.random.bytes(9_000), torch.rand(5_000).sum().item()


@pytest.mark.parametrize("way", WAYS)
def test_generators_go_on_exactly_where_they_were_put_aside(way):
    generators = WAYS[way]()
    seed_everything(51)
    for num_before in range(3):
        for _ in range(num_before):
            many_draws()
        state = generators.new_state()
        expected = many_draws(), many_draws()
        for seed in (1, 2):
            generators.seed(seed)
            many_draws()
        generators.put(state)
        assert (many_draws(), many_draws()) == expected
        generators.put(state)
        assert (many_draws(), many_draws()) == expected, "a state may be put back twice"


def test_both_ways_to_seed_give_the_same_numbers():
    for seed in (0, 1, 2**32 + 1, 2**64 - 1):
        drawn = []
        for generators in (kind() for kind in WAYS.values()):
            draw()
            generators.seed(seed)
            drawn.append((many_draws(), torch.initial_seed()))
        assert drawn[0] == drawn[1]
        assert drawn[0][1] == seed


def test_this_machine_s_generators_are_reached_in_memory():
    assert type(GENERATORS) is MappedGenerators


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.MT19937])
def test_what_is_seeded_inside_leaves_any_generator_of_numpy_alone(way, kind):
    generators = WAYS[way]()
    before = np.random.get_bit_generator()
    generators.seed(9)
    expected_inside = draw()
    try:
        outside = kind(3)
        np.random.set_bit_generator(outside)
        expected = np.random.rand(5).tolist()
        np.random.set_bit_generator(outside := kind(3))
        state = generators.new_state()
        for number in range(5):
            generators.take(state)
            generators.seed(9)
            assert draw() == expected_inside
            if number % 2:  # the data set does as it likes
                np.random.set_bit_generator(np.random.MT19937(4))
                np.random.rand()
            generators.put(state)
            assert np.random.get_bit_generator() is outside
            assert np.random.rand() == expected[number]
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_with_half_a_pair_of_normals(way):
    def normals():
        return random.gauss(0, 1), float(np.random.randn()), torch.randn((), dtype=torch.float64).item()

    generators = WAYS[way]()
    generators.seed(12)
    alone = [normals() for _ in range(4)]
    generators.seed(12)
    state = generators.new_state()
    mixed = []
    for number in range(4):
        mixed.append(normals())
        generators.take(state)
        generators.seed(number)
        inside = normals()
        generators.put(state)
        assert inside != alone[0]
    assert mixed == alone
