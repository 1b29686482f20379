"""Batches by tokens hold each sample once, fit, resume exactly, and train as one process does."""

import pytest
import torch
from small import quiet, raises
from torch import nn
from torch.utils.data import DataLoader

from echelon import ConfigError, DataError, SampleLedger, TokenBatchSampler, TrainModule, lengths_of, seed_everything
from echelon.callbacks.samples.audit import audit_ledger, samples_folder
from echelon.testing import run_ranks

MAX_TOKENS, VOCABULARY = 64, 11


def texts(num=60):
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(2, 20, (num,), generator=generator).tolist()
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


TEXTS = texts()
LENGTHS = lengths_of(TEXTS)


@pytest.mark.parametrize("multiple_of", [1, 4, 7])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("buckets", [1, 3, 100])
def test_every_sample_comes_once_in_batches_that_fit(buckets, shuffle, multiple_of):
    sampler = TokenBatchSampler(
        LENGTHS, max_tokens=MAX_TOKENS, buckets=buckets, shuffle=shuffle, seed=3, multiple_of=multiple_of
    )
    epochs = [list(sampler.entries_from(epoch, 0)) for epoch in range(3)]
    for batches in epochs:
        assert sorted(index for batch in batches for index in batch) == list(range(len(TEXTS)))
        assert max(len(batch) * int(LENGTHS[batch].max()) for batch in batches) <= MAX_TOKENS
        assert len(batches) == len(sampler) and len(sampler) % multiple_of == 0
    assert (epochs[0] != epochs[1]) == shuffle
    sampler.set_epoch(1)
    assert list(sampler) == epochs[1]
    for start in (1, 5, len(sampler)):
        assert list(sampler.entries_from(1, start)) == epochs[1][start:]


def test_drop_last_leaves_out_other_samples_in_each_epoch():
    sampler = TokenBatchSampler(LENGTHS, max_tokens=MAX_TOKENS, buckets=3, seed=1, drop_last=True, multiple_of=2)
    epochs = [[index for batch in sampler.entries_from(epoch, 0) for index in batch] for epoch in range(2)]
    assert all(len(set(epoch)) == len(epoch) < len(TEXTS) for epoch in epochs)
    assert set(epochs[0]) != set(epochs[1])
    assert len(sampler) % 2 == 0


def test_buckets_save_padding():
    def padded(buckets):
        sampler = TokenBatchSampler(lengths, max_tokens=4096, buckets=buckets, seed=0)
        return sum(len(batch) * int(lengths[batch].max()) for batch in sampler) / int(lengths.sum())

    normal = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    lengths = (normal * 0.7 + 5).exp().clamp(8, 1024).long()
    assert padded(1) > 1.8
    assert padded(32) < 1.1


@pytest.mark.parametrize(
    ("lengths", "options", "error", "parts"),
    [
        ([3, 65], {}, DataError, ("from 1 to max_tokens=64", "65 for sample 1", "raise max_tokens")),
        ([3, 0, 0], {}, DataError, ("got 0 for sample 1", "2 such samples")),
        ([3.5], {}, DataError, ("one integer for each sample", "float32")),
        ([3], {"max_tokens": 0}, ConfigError, ("max_tokens must be at least 1", "max_tokens=0")),
        ([3, 4], {"multiple_of": 4}, ConfigError, ("multiple_of=4", "2 samples", "drop_last=True")),
    ],
)
def test_mistakes_are_named(lengths, options, error, parts):
    with raises(error, *parts):
        TokenBatchSampler(lengths, **{"max_tokens": MAX_TOKENS, **options})


def pad(samples):
    inputs = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    labels = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-100)
    return {"input_ids": inputs[:, :-1], "labels": labels[:, 1:]}


class Bigram(TrainModule):
    def __init__(self):
        super().__init__()
        seed_everything(5)
        self.logits = nn.Embedding(VOCABULARY, VOCABULARY, dtype=torch.float64)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["input_ids"].tolist())
        return nn.functional.cross_entropy(self.logits(batch["input_ids"]).transpose(1, 2), batch["labels"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def sampler_of_four():
    return TokenBatchSampler(LENGTHS, max_tokens=MAX_TOKENS, buckets=4, seed=6, multiple_of=4)


def train(accumulate, ckpt_path=None, **settings):
    module = Bigram()
    trainer = quiet(max_epochs=2, devices="auto", accumulate_grad_batches=accumulate, **settings)
    loader = DataLoader(TEXTS, batch_sampler=sampler_of_four(), collate_fn=pad)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer, module


def by_hand():
    """Return the parameters after two epochs, whose steps are the means over the tokens of four batches at once."""
    module = Bigram()
    optimizer, sampler = module.configure_optimizers(), sampler_of_four()
    for epoch in range(2):
        batches = list(sampler.entries_from(epoch, 0))
        for start in range(0, len(batches), 4):
            batch = pad([TEXTS[index] for four in batches[start : start + 4] for index in four])
            module.training_step(batch, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
    return module.logits.weight.detach()


def stop_and_resume(folder, accumulate):
    trainer, whole = train(accumulate, strategy="ddp")
    parts = []
    for step in (1, trainer.global_step // 2, trainer.global_step - 1):
        begun, first = train(accumulate, strategy="ddp", max_steps=step)
        begun.save_checkpoint(f"{folder}/{step}.ckpt")
        _, rest = train(accumulate, f"{folder}/{step}.ckpt", strategy="ddp")
        parts.append((first.seen + rest.seen, rest.logits.weight.detach()))
    return whole.seen, whole.logits.weight.detach(), parts


def test_steps_are_the_mean_over_tokens_and_a_resumed_run_goes_on_exactly(tmp_path):
    expected = by_hand()
    for ranks, accumulate in ((1, 4), (2, 2)):
        results = run_ranks(stop_and_resume, ranks, str(tmp_path / str(ranks)), accumulate, timeout=240)
        for seen, weight, parts in results:
            assert (weight - expected).abs().max() < 1e-12
            assert len(seen) == 2 * len(sampler_of_four()) // ranks  # as many on each rank
            for resumed, resumed_weight in parts:
                assert resumed == seen
                assert torch.equal(resumed_weight, weight)


def test_the_ledger_counts_each_sample_once(tmp_path):
    train(1, default_root_dir=tmp_path, callbacks=SampleLedger())
    found = audit_ledger(samples_folder(tmp_path))
    assert found.is_exact and [epoch.source.comes_once for epoch in found.epochs] == [1, 1]
