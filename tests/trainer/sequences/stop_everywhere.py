"""Stops a run after every step of two epochs and resumes it, on real ranks with workers, for each kind of data.

    python tests/trainer/sequences/stop_everywhere.py [--ranks 1 2 3] [--workers 0 2] [--kinds packed mixture ...]

Each case trains two epochs undisturbed and saves a checkpoint after every step. From each one another run goes on, with
the same ranks and with others; and one run is stopped after every single step, each part of it resumed from the one
before. All must read what the undisturbed run read, in order. `make sweep` runs all cases; a few are tests.
"""

import argparse
import itertools
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset

from echelon import Callback, Mixture, PackedDataset, TokenBatchSampler, Trainer, TrainModule
from echelon.testing import run_ranks

NUM_EPOCHS = 2
TEXTS = [torch.arange(length) + 100 * number for number, length in enumerate([3, 9, 5, 12, 4, 7, 2, 11, 6, 8] * 3)]
IN_SHARDS = frozenset({"shards"})
"""Kinds whose order depends on the number of readers."""
BY_BATCH = frozenset({"packed_stream", "mixture_of_streams", "mixture_of_shards", "stream", "resumable"})
"""Streams, whose batches are dealt to the ranks in turn: the three of a step give two ranks steps of four."""


class Numbers(IterableDataset):
    """A stream that is told the epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from range(1000 * self.epoch, 1000 * self.epoch + 35)


class Resumable(Numbers):
    """The same with a state."""

    position = 0

    def __iter__(self):
        start, self.position = self.position, 0
        for place in range(start, 35):
            self.position = place + 1
            yield 1000 * self.epoch + place
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Shards(IterableDataset):
    """A stream in shards of different lengths."""

    def __init__(self, parts=None):
        self.parts = parts or [[*range(start, 36, 6)] for start in range(6)]

    @property
    def num_shards(self):
        return len(self.parts)

    def shard(self, num_shards, index):
        return Shards(self.parts[index::num_shards])

    def __iter__(self):
        return itertools.chain(*self.parts)


class Documents(IterableDataset):
    """A stream of texts."""

    def __iter__(self):
        return iter(TEXTS)


def pad(samples):
    """Return texts of one length."""
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


def collate(packs):
    """Return the tokens of packs."""
    return torch.stack([pack["input_ids"] for pack in packs])


def packed(workers):
    return DataLoader(PackedDataset(TEXTS, 16), 2, shuffle=True, num_workers=workers, collate_fn=collate)


def packed_stream(workers):
    return DataLoader(PackedDataset(Documents(), 16, buffer=8), 2, num_workers=workers, collate_fn=collate)


def token_batches(workers):
    batches = TokenBatchSampler([len(text) for text in TEXTS], max_tokens=36, seed=1)
    return DataLoader(TEXTS, batch_sampler=batches, num_workers=workers, collate_fn=pad)


def mixture(workers):
    sources = {"a": (list(range(40)), 0.7), "b": (list(range(100, 109)), 0.3)}
    return DataLoader(Mixture(sources, stop=34), 3, num_workers=workers)


def mixture_of_streams(workers):
    sources = {"a": (list(range(5000, 5020)), 0.6), "s": (Numbers(), 0.4)}
    return DataLoader(Mixture(sources, stop=34), 3, num_workers=workers)


def mixture_of_shards(workers):
    sources = {"a": (list(range(5000, 5020)), 0.4), "s": (Shards(), 0.6)}
    return DataLoader(Mixture(sources, stop=34), 3, num_workers=workers)


def stream(workers):
    return DataLoader(Numbers(), 3, num_workers=workers)


def resumable(workers):
    return DataLoader(Resumable(), 3, num_workers=workers)


def shards(workers):
    return DataLoader(Shards(), 3, num_workers=workers)


KINDS = {
    make.__name__: make
    for make in (
        packed,
        packed_stream,
        token_batches,
        mixture,
        mixture_of_streams,
        mixture_of_shards,
        stream,
        resumable,
        shards,
    )
}


class Reader(TrainModule):
    """Notes the samples of each step."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.read = {}

    def training_step(self, batch, batch_idx):
        self.read.setdefault(self.trainer.global_step, []).extend(batch.tolist())
        return self.weight.square().sum() + 0 * batch.sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saves(Callback):
    """Saves a checkpoint after each step."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_step_end(self, trainer, module):
        trainer.save_checkpoint(self.folder / f"step={trainer.global_step}.ckpt")


def fit(kind, workers, ckpt_path=None, saves_in=None, max_steps=-1, save_at=None):
    """Train, and return the samples of this rank by step."""
    module = Reader()
    trainer = Trainer(
        strategy="ddp" if world() > 1 else "single",
        accelerator="cpu",
        max_epochs=NUM_EPOCHS,
        max_steps=max_steps,
        logger=False,
        callbacks=[] if saves_in is None else [Saves(saves_in)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, KINDS[kind](workers), ckpt_path=ckpt_path)
    if save_at is not None:
        trainer.save_checkpoint(save_at)
    return module.read


def be_quiet():
    """Say nothing of what a run says once, as there are thousands."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def run_whole(cases, folder):
    """Return what this rank reads in each case, undisturbed; checkpoints of every step are left in the folder."""
    be_quiet()
    return {case: fit(*case, saves_in=place_of(folder, case)) for case in cases}


def go_on(cases, folder, num_steps, every, is_chained):
    """Return what this rank reads from every n-th step of each case on, and if each part goes on from the last."""
    be_quiet()
    found = {}
    for case in cases:
        here = place_of(folder, case)
        for step in range(every, num_steps[case], every):
            found[case, step] = fit(*case, ckpt_path=here / f"step={step}.ckpt")
        chain = here / "chain" / f"{world()}"
        for step in range(0, num_steps[case], every) if is_chained else ():
            before = chain / f"{step}.ckpt" if step else None
            end = min(step + every, num_steps[case])
            read = fit(*case, ckpt_path=before, max_steps=end, save_at=chain / f"{end}.ckpt")
            found.setdefault((case, "chain"), {}).update(read)
    return found


def world():
    """Return the number of ranks."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def place_of(folder, case):
    """Return the folder of a case."""
    return Path(folder) / f"{case[0]}-{case[1]}"


def steps_of(by_rank):
    """Return the samples of all ranks by step."""
    numbers = sorted({step for read in by_rank for step in read})
    return {step: list(itertools.chain(*(read.get(step, []) for read in by_rank))) for step in numbers}


def in_order(steps, start=0):
    """Return the samples from a step on."""
    return list(itertools.chain(*(read for step, read in steps.items() if step >= start)))


def sweep(cases, num_ranks, others, folder, every=1, timeout=600):
    """Return the number of resumes of cases on some ranks, and go on with other numbers of them.

    Raises:
        AssertionError: naming the case and the step, if anything else is read than by the undisturbed run.
    """
    whole = run_ranks(run_whole, num_ranks, cases, folder, timeout=timeout)
    expected = {case: steps_of([read[case] for read in whole]) for case in cases}
    num_steps = {case: len(steps) for case, steps in expected.items()}
    resumes = 0
    for other in (num_ranks, *others):
        is_same = other == num_ranks
        results = run_ranks(go_on, other, cases, folder, num_steps, every, is_same, timeout=timeout)
        for key in results[0]:
            case, step = key
            found = steps_of([result[key] for result in results])
            resumes += num_steps[case] // every if step == "chain" else 1
            what = f"{case}, {num_ranks} to {other} ranks, after step {step}"
            start = 0 if step == "chain" else step
            if is_same:
                assert found == {at: read for at, read in expected[case].items() if at >= start}, what
            elif case[0] in IN_SHARDS or (case[0] in BY_BATCH and num_ranks % other and other % num_ranks):
                assert sorted(in_order(found)) == sorted(in_order(expected[case], start)), what
            else:
                assert in_order(found) == in_order(expected[case], start), what
    return resumes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--timeout", type=float, default=3600, help="seconds of each launch of ranks")
    options = parser.parse_args()
    failures = 0
    for num_ranks, workers in itertools.product(options.ranks, options.workers):
        folder, began = tempfile.mkdtemp(), time.monotonic()
        others = () if workers else [other for other in (1, 2, 3) if other != num_ranks]
        cases = [(kind, workers) for kind in options.kinds]
        try:
            told = f"{sweep(cases, num_ranks, others, folder, timeout=options.timeout)} resumes"
        except AssertionError as error:
            failures += 1
            told = f"FAILED: {str(error).splitlines()[0]}"
        finally:
            shutil.rmtree(folder)
        print(f"{num_ranks} ranks, {workers} workers: {told}, {time.monotonic() - began:.0f} s", flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
