"""Samplers with state of their own go on in a resumed run as if it had never stopped, and are the same on all ranks."""

import os
import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from resuming import NUM_SAMPLES, Numbered, Run, Small, assert_exact, fit, numbered
from sweep import IS_SWEEP, dealt
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler

from echelon import Trainer, seed_everything
from echelon.testing import run_ranks


class Drawing(Sampler):
    """Draws a permutation with a generator of its own, and one more number for each index."""

    def __init__(self, rng: Any, size: int = NUM_SAMPLES) -> None:
        self.rng, self.size = rng, size

    def __iter__(self):
        order = list(range(self.size))
        while order:
            yield order.pop(self.below(len(order)))

    def below(self, number):
        if isinstance(self.rng, random.Random):
            return self.rng.randrange(number)
        if isinstance(self.rng, torch.Generator):
            return int(torch.randint(number, (), generator=self.rng))
        draw = self.rng.integers if isinstance(self.rng, np.random.Generator) else self.rng.randint
        return int(draw(number))

    def __len__(self):
        return self.size


class Wrapping(Sampler):
    """Gives another sampler's indices, turned around."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return iter(list(self.sampler)[::-1])

    def __len__(self):
        return len(self.sampler)


class InPlace(Sampler):
    """Shuffles its own list, with the global generator of Python, and counts its epochs after the last index."""

    def __init__(self, size=NUM_SAMPLES):
        self.order, self.epochs = list(range(size)), 0

    def __iter__(self):
        random.shuffle(self.order)
        yield from self.order[self.epochs :] + self.order[: self.epochs]
        self.epochs += 1

    def __len__(self):
        return len(self.order)


class PerClass(BatchSampler):
    """Batches with as many of each class, each of which has a generator, and goes on where it was."""

    def __init__(self):
        self.classes = [list(range(0, NUM_SAMPLES, 2)), list(range(1, NUM_SAMPLES, 2))]
        self.rngs = {number: np.random.default_rng(number) for number in range(2)}
        self.at = [0, 0]

    def __iter__(self):
        for _ in range(5):
            batch = []
            for number, members in enumerate(self.classes):
                if self.at[number] + 2 > len(members):
                    self.rngs[number].shuffle(members)
                    self.at[number] = 0
                batch += members[self.at[number] : self.at[number] + 2]
                self.at[number] += 2
            yield batch

    def __len__(self):
        return 5


class Saving(Drawing):
    """Has a state_dict, with a generator that nobody finds; `is_ahead` leaves its position at the end of an epoch."""

    def __init__(self, is_ahead=False):
        super().__init__(None)
        hidden = random.Random(8)
        self.draw, self.states = hidden.randrange, (hidden.getstate, hidden.setstate)
        self.position, self.is_ahead, self.next = 0, is_ahead, 0

    def below(self, number):
        return self.draw(number)

    def __iter__(self):
        start, self.next, self.position = self.next, 0, 0
        for index in islice(super().__iter__(), start, None):
            self.position += 1
            yield index

    def state_dict(self):
        version, words, gauss = self.states[0]()
        return {"version": version, "words": list(words), "gauss": gauss, "position": self.position}

    def load_state_dict(self, state):
        self.states[1]((state["version"], tuple(state["words"]), state["gauss"]))
        self.next = state["position"] if self.is_ahead else 0


class Endless(Drawing):
    """Has no end and no length, so that a limit ends each epoch inside of it."""

    def __iter__(self):
        while True:
            yield from super().__iter__()

    __len__ = None


def by(sampler, **options):
    return numbered(shuffle=False, sampler=sampler, **options)


def given(seed):
    return torch.Generator().manual_seed(seed)


KINDS = {
    "numpy": lambda: by(Drawing(np.random.default_rng(0))),
    "numpy, old": lambda: by(Drawing(np.random.RandomState(0))),
    "python, in workers": lambda: by(Drawing(random.Random(0)), num_workers=2),
    "torch, by another name": lambda: by(Drawing(given(0))),
    "wrapped twice": lambda: by(Wrapping(Wrapping(Drawing(np.random.default_rng(0))))),
    "in a batch sampler": lambda: DataLoader(
        Numbered(), batch_sampler=BatchSampler(Drawing(random.Random(0)), 3, drop_last=True)
    ),
    "torch's in a batch sampler": lambda: DataLoader(
        Numbered(), batch_sampler=BatchSampler(RandomSampler(Numbered(), generator=given(1)), 3, drop_last=False)
    ),
    "in place": lambda: by(InPlace()),
    "a length of several chunks": lambda: by(InPlace(64), batch_size=16),
    "for each class": lambda: DataLoader(Numbered(), batch_sampler=PerClass()),
    "with a state": lambda: by(Saving()),
    "with a state that is ahead": lambda: by(Saving(is_ahead=True)),
}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_with_state_of_its_own_reads_on(memory_path, kind):
    build = KINDS[kind]
    stops = [7] if "workers" in kind else [2, 4, 7, 10] if IS_SWEEP else [4, 7]
    assert_exact(lambda: Run(Small(), build(), None, {"max_epochs": 3}), memory_path, stops)


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "workers"), dealt([Drawing, Endless], [0, 2], [0]))
def test_an_epoch_that_ends_before_its_sampler_reads_on(memory_path, kind, workers):
    def build():
        loader = by(kind(np.random.default_rng(0), 200), num_workers=workers)
        loader.dataset.num_samples = 200
        return Run(Small(), loader, None, {"max_epochs": 3, "limit_train_batches": 3})

    assert_exact(build, memory_path, [4] if workers else [2, 3, 4, 6, 7])


def test_an_epoch_that_ends_before_its_sampler_leaves_the_same_with_and_without_workers(memory_path):
    runs = []
    for workers in (0, 2):
        seed_everything(1)
        loader = by(Drawing(np.random.default_rng(0), 200), num_workers=workers)
        loader.dataset.num_samples = 200
        run = Run(Small(), loader, None, {"max_epochs": 2, "limit_train_batches": 3})
        runs.append(fit(run, memory_path / str(workers)).samples)
    assert runs[0] == runs[1]


class LookingAhead(DataLoader):
    """Reads a batch before each epoch, which it does not give."""

    def __iter__(self):
        next(super().__iter__())
        return super().__iter__()


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "workers"), dealt([Drawing, Endless], [0, 2], [0]))
def test_a_loader_that_begins_twice_reads_the_same(memory_path, kind, workers):
    def build(loader_type):
        sampler = kind(np.random.default_rng(0), 200)
        loader = loader_type(Numbered(), batch_size=3, sampler=sampler, num_workers=workers)
        loader.dataset.num_samples = 200
        return Run(Small(), loader, None, {"max_epochs": 2, "limit_train_batches": 3})

    seed_everything(1)
    plain = fit(build(DataLoader), memory_path / "plain").samples
    whole = assert_exact(lambda: build(LookingAhead), memory_path, [4])
    assert whole.samples == plain


def test_a_checkpoint_without_the_state_of_the_sampler_reads_on_from_the_seed(memory_path, monkeypatch):
    from echelon.trainer.data.sampled import Sampled

    whole = fit(Run(Small(), by(Drawing(np.random.default_rng(0)))), memory_path / "whole")
    with monkeypatch.context() as older:
        older.setattr(Sampled, "state_dict", lambda *_, **__: None)
        fit(Run(Small(), by(Drawing(np.random.default_rng(0)))), memory_path / "parts", stop_after=7)
    resumed = fit(Run(Small(), by(Drawing(np.random.default_rng(0)))), memory_path / "parts", ckpt_path="last")
    assert resumed.samples == whole.samples[7:]


class Unseeded(Drawing):
    """Differs between processes."""

    def __init__(self):
        super().__init__(np.random.default_rng(int.from_bytes(os.urandom(8), "big")))


def read_by_rank(strategy: str) -> list[list[int]]:
    """Return the samples that a rank was given in training and in validation, over two epochs."""
    seed_everything(1)

    class Noting(Small):
        def training_step(self, batch, batch_idx):
            read[0] += batch[1].tolist()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            read[1] += batch[1].tolist()

    read: list[list[int]] = [[], []]
    trainer = Trainer(
        strategy=strategy,
        devices=2,
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Noting(), by(Unseeded(), batch_size=7), by(Unseeded(), batch_size=1))
    return read


def test_ranks_share_the_order_of_a_sampler_that_nobody_has_seeded():
    ranks = run_ranks(read_by_rank, 2, "ddp", timeout=120)
    for read in zip(*ranks, strict=True):
        assert sorted(read[0] + read[1]) == sorted(list(range(NUM_SAMPLES)) * 2)
