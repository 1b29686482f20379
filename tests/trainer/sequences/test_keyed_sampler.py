"""The keyed order is a permutation of good statistics that any place is read from at once, in a loop and in a fit."""

import math
import resource
import tracemalloc

import pytest
import torch
from small import Regression, flat, loader, quiet, raises
from torch.utils.data import DataLoader

from echelon import ConfigError, KeyedSampler, SampleLedger, seed_everything
from echelon.callbacks.samples.audit import audit_ledger, samples_folder
from echelon.testing import run_ranks
from echelon.trainer.sequences.keyed_permutation import KeyedPermutation

HUGE = 10**12


@pytest.mark.parametrize("sizes", [range(20), range(20, 301), (509, 1021, 4099)], ids=["tiny", "small", "primes"])
def test_each_index_comes_once(sizes):
    for size in sizes:
        assert sorted(KeyedPermutation(size, 3, size)[:].tolist()) == list(range(size))


def deviations(counts, expected, freedom):
    """Return by how many standard deviations the chi-square of counts is above its mean."""
    counts = torch.as_tensor(counts, dtype=torch.float64)
    return (float(((counts - expected) ** 2 / expected).sum()) - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("size", [1, 2, 9, 40, 10**6, 2**62])
def test_a_position_read_alone_or_with_a_few_is_the_one_read_with_many(size):
    order = KeyedPermutation(size, 7, -size)
    positions = torch.randint(0, size, (200,))
    many = order[positions].tolist()
    assert [order[int(position)] for position in positions] == many
    assert order[positions.view(20, 2, 5)[:3]].flatten().tolist() == many[:30]


def test_each_index_is_at_each_place_equally_often_over_epochs():
    size, epochs = 64, 320
    counts, places = torch.zeros(size, size), torch.arange(size)
    for epoch in range(epochs):
        counts[places, KeyedPermutation(size, 1, epoch)[:]] += 1
    assert abs(deviations(counts, epochs / size, (size - 1) ** 2)) < 4


def test_each_order_of_few_samples_comes_equally_often():
    orders, epochs = {}, 240
    for epoch in range(epochs):
        order = tuple(KeyedPermutation(4, 5, epoch)[:].tolist())
        orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 24
    assert abs(deviations(list(orders.values()), epochs / 24, 23)) < 4


def correlation(x, y):
    return float(torch.corrcoef(torch.stack([x, y]).double())[0, 1])


@pytest.mark.parametrize("size", [20_000, 16_384, HUGE])
def test_places_neighbors_and_epochs_are_unrelated(size):
    num = 16_384
    order, other = (KeyedPermutation(size, 1, epoch)[:num] for epoch in (0, 1))
    bound = 4 / math.sqrt(num)
    for lag in (1, 2, 3, 64):
        assert abs(correlation(order[lag:], order[:-lag])) < bound
    assert abs(correlation(order, other)) < bound
    assert abs(correlation(order, torch.arange(num))) < bound
    # the parts of the range in each stretch of places
    counts = torch.zeros(16, 16)
    counts.index_put_((torch.arange(num) * 16 // num, order * 16 // size), torch.ones(()), accumulate=True)
    assert deviations(counts, num / 256, 225) < 4  # below the mean where nearly all indices are drawn
    assert int((order == other).sum()) < 10


def test_any_place_of_a_huge_order_is_read_alone():
    order = KeyedPermutation(HUGE, 7, 0)
    part = order[HUGE - 1000 :]
    assert len(part.unique()) == 1000 and int(part.min()) >= 0 and int(part.max()) < HUGE
    assert order[HUGE - 1] == order[-1] == int(part[-1])
    assert torch.equal(order[HUGE - 1000 : HUGE : 8], part[::8])
    assert torch.equal(order[torch.tensor([[-1, HUGE - 3]])], part[torch.tensor([[-1, -3]])])
    ranks = [order[rank:4096:1024] for rank in range(1024)]
    assert torch.equal(torch.stack(ranks, 1).flatten(), order[:4096])
    with pytest.raises(IndexError, match=f"below {HUGE}"):
        order[HUGE]
    with pytest.raises(IndexError, match=f"below {HUGE}"):
        order[torch.tensor([HUGE])]


def test_a_loop_reads_it_and_goes_on_from_any_position():
    sampler = KeyedSampler(range(1000), seed=3)
    whole = [int(index) for batch in DataLoader(range(1000), 8, sampler=sampler) for index in batch]
    assert sorted(whole) == list(range(1000)) == sorted(set(whole))
    for start in (0, 1, 64, 65, 999):
        sampler.set_epoch(0, start)
        assert list(sampler) == whole[start:]
    sampler.set_epoch(1)
    assert list(sampler) != whole


def test_its_seed_is_its_own_or_that_of_the_run():
    def seen(seed, own):
        seed_everything(seed)
        module = Regression()
        quiet(max_epochs=1).fit(module, loader(40, 4, sampler=KeyedSampler(40, seed=own)))
        return flat(module.seen)

    assert seen(1, 5) == seen(2, 5) == KeyedPermutation(40, 5, 0)[:].tolist()
    assert seen(1, None) == seen(1, None) != seen(2, None)


@pytest.mark.parametrize("size", [-1, 2**62 + 1])
def test_an_impossible_size_is_refused(size):
    with pytest.raises(ConfigError, match=f"from 0 to 2 \\*\\* 62, got {size}"):
        KeyedSampler(size)


def test_a_stream_is_refused():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield 1

    with raises(ConfigError, "with a length", "got Stream", "shuffle in the stream"):
        KeyedSampler(Stream())


class Huge(torch.utils.data.Dataset):
    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        value = torch.tensor([float(index)])
        return value.expand(2) / 1e9, value / 1e9


def test_the_first_batches_of_a_billion_samples_need_no_memory():
    trainer = quiet(max_epochs=1, max_steps=2)
    data = DataLoader(Huge(), 4, sampler=KeyedSampler(Huge(), seed=3))
    trainer.fit(Regression(lr=0.0), data)  # imports, once
    tracemalloc.start()
    before, resident = tracemalloc.get_traced_memory()[0], peak_bytes()
    module = Regression(lr=0.0)
    trainer = quiet(max_epochs=1, max_steps=2)
    trainer.fit(module, data)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < 20e6
    assert peak_bytes() - resident < 50e6  # torch's tensors are not Python's memory
    read = torch.cat([batch[1].flatten() for batch in module.seen]) * 1e9
    assert torch.allclose(read, KeyedPermutation(10**9, 3, 0)[:8].float())
    assert trainer.num_training_batches == 250_000_000


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def stop_and_resume(folder, accumulate):
    """Return what this rank read of two epochs: undisturbed, and stopped and resumed after each of several steps."""

    def fit(ckpt_path=None, **settings):
        module = Regression()
        trainer = quiet(max_epochs=2, strategy="ddp", devices="auto", accumulate_grad_batches=accumulate, **settings)
        trainer.fit(module, loader(22, 2, sampler=KeyedSampler(22, seed=9)), ckpt_path=ckpt_path)
        return trainer, flat(module.seen)

    parts = []
    for step in (1, 4, 6, 8):
        trainer, begun = fit(max_steps=step)
        trainer.save_checkpoint(f"{folder}/{step}.ckpt")
        parts.append((begun, fit(f"{folder}/{step}.ckpt")[1]))
    return fit()[1], parts


def test_a_resumed_run_goes_on_exactly_on_one_and_two_ranks(tmp_path):
    for ranks, accumulate in ((1, 2), (2, 1)):
        folder = tmp_path / str(ranks)
        results = run_ranks(stop_and_resume, ranks, str(folder), accumulate, timeout=240)
        for whole, parts in results:
            assert all(begun + resumed == whole for begun, resumed in parts)
        epoch = [KeyedPermutation(22, 9, epoch)[:].tolist() for epoch in range(2)]
        steps = [order[start : start + 4] for order in epoch for start in range(0, 22, 4)]
        read = [[index for step in steps for index in step[rank * 2 : rank * 2 + 2]] for rank in range(2)]
        if ranks == 1:
            assert results[0][0] == [index for step in steps for index in step]
        else:
            assert sorted(results[0][0] + results[1][0]) == sorted(2 * list(range(22)))
            assert results[0][0][:10] == read[0][:10] and results[1][0][:10] == read[1][:10]


def test_the_ledger_counts_each_sample_once(tmp_path):
    trainer = quiet(tmp_path, max_epochs=2, callbacks=SampleLedger())
    trainer.fit(Regression(), loader(22, 4, sampler=KeyedSampler(22)))
    found = audit_ledger(samples_folder(tmp_path))
    assert found.is_exact and [epoch.source.comes_once for epoch in found.epochs] == [1, 1]
