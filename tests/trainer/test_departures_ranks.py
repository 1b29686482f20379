"""Deliberate departures from Lightning that take several ranks to show (measured on Lightning 2.6.6).

Each experiment below runs once on two and once on three real processes; a test looks at what it gave on each rank.
"""

import os
import signal
import sys
from itertools import chain
from pathlib import Path

import pytest
import torch
from ports import free_port
from small import Regression, flat, indices, loader, quiet, samples
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from two_nodes import run_together

from echelon import Callback, ModelCheckpoint, seed_everything
from echelon.testing import run_ranks
from echelon.trainer import checkpoint

JOB = str(Path(__file__).with_name("job_of_ranks.py"))


def many(**settings):
    return quiet(strategy="ddp", max_epochs=1, **settings)


def rank():
    return int(os.environ["RANK"])


def weights(module):
    return nn.utils.parameters_to_vector(module.parameters()).tolist()


# --- the experiments, each on every rank


class Measured(Regression):
    """Logs a constant, the number of samples and the mean of their numbers, 0, 1, 2, ..."""

    def training_step(self, batch, batch_idx):
        self.log("one", 1.0, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_one", 1.0)
        self.log("val_samples", float(len(batch[0])), reduce_fx="sum")
        self.log("val_mean", batch[1].double().mean() * 10)

    def predict_step(self, batch, batch_idx):
        return batch[1].flatten()


def five_samples():
    results = {}
    for batch_size in (1, 2, 3):
        module = Measured()
        (values,) = many().validate(module, loader(5, batch_size), verbose=False)
        results[batch_size] = flat(module.validated), values
    return results


def a_constant():
    trainer = many()
    trainer.fit(Measured(), loader(7, 2), loader(5, 2))
    return trainer.callback_metrics["one"].item(), trainer.callback_metrics["val_one"].item()


def uneven_samples():
    module, trainer = Regression(), many()
    trainer.fit(module, loader(7, 2))
    return flat(module.seen), trainer.samples_seen, trainer.global_step, weights(module)


class Stream(IterableDataset):
    """8 samples on rank 0, 3 on rank 1, none on rank 2, each of them different."""

    def __init__(self, rank):
        self.part = range(100 * rank, 100 * rank + (8, 3, 0)[rank])

    def __iter__(self):
        return iter([samples(300)[index] for index in self.part])


def uneven_streams():
    module, trainer = Regression(lr=0.01), many()
    trainer.fit(module, DataLoader(Stream(rank()), 2))
    return flat(module.seen), trainer.samples_seen, trainer.global_step, weights(module)


def predictions():
    return [
        [batch.mul(10).round().int().tolist() for batch in many().predict(Measured(), loader(11, batch_size))]
        for batch_size in (1, 2, 4)
    ]


class InOrder:
    """The lists of a user, who wants them in this order; counts how often they are asked for."""

    def __init__(self):
        self.lists = [[8, 9], [0, 7], [2], [4, 3, 5], [6], [1, 10]]
        self.times = 0

    def __iter__(self):
        self.times += 1
        return iter(self.lists)

    def __len__(self):
        return len(self.lists)


def batches_of_the_user():
    module, mine = Regression(), InOrder()
    data = DataLoader(samples(11), batch_sampler=mine)
    many().fit(module, data)
    return indices(module.seen), mine.times, data.batch_sampler is mine


class Dropped(Regression):
    """Notes which of 64 units the dropout leaves, in each step."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def training_step(self, batch, batch_idx):
        self.masks.append("".join("01"[int(unit)] for unit in nn.functional.dropout(torch.ones(64)) > 0))
        return super().training_step(batch, batch_idx)


def dropout():
    masks = []
    for _ in range(2):
        seed_everything(3, verbose=False)
        module = Dropped()
        many().fit(module, loader(12, 2))
        masks.append(module.masks)
    return masks


class Two(Regression):
    def configure_optimizers(self):
        return [torch.optim.SGD([parameter], lr=0.01) for parameter in self.parameters()]


def two_optimizers():
    trainer = quiet(strategy="ddp", max_steps=5)
    trainer.fit(Two(), loader(12, 2))
    return trainer.global_step, trainer.counters.optimizer_steps


class SignalsRankOne(Callback):
    """Sends SIGTERM to rank 1, in the middle of an accumulation window."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.strategy.rank == 1 and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def train_saving(folder, *callbacks, **settings):
    seed_everything(3, verbose=False)
    module = Regression(lr=0.01)
    module.net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
    saves = ModelCheckpoint(folder, save_last=True)
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2, **settings}
    trainer = quiet(folder, strategy="ddp", enable_checkpointing=True, callbacks=[saves, *callbacks], **settings)
    code = None
    try:
        trainer.fit(module, loader(40, 2, shuffle=True), ckpt_path="last")
    except SystemExit as error:
        code = error.code
    return code, trainer.global_step, weights(module)


def a_signal_to_rank_one(folder):
    undisturbed = train_saving(folder / "undisturbed")
    stopped = train_saving(folder / "signalled", SignalsRankOne())
    saved = [found.path.name for found in checkpoint.list_checkpoints(folder / "signalled")]
    return undisturbed, stopped, saved, train_saving(folder / "signalled")


EXPERIMENTS = (
    *(five_samples, a_constant, uneven_samples, uneven_streams, predictions, batches_of_the_user, dropout),
    *(two_optimizers,),
)


def run_all(folder):
    results = {experiment.__name__: experiment() for experiment in EXPERIMENTS}
    return results | {"a_signal_to_rank_one": a_signal_to_rank_one(folder)}


# --- what they gave


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.only_in_sweep), 3])
def found(request, tmp_path_factory):
    """What an experiment gave on each rank, by its name."""
    results = run_ranks(run_all, request.param, tmp_path_factory.mktemp("ranks"))
    return lambda experiment: [result[experiment.__name__] for result in results]


def test_an_evaluation_of_five_samples_sees_each_once(found):
    ranks = found(five_samples)
    for batch_size in (1, 2, 3):
        seen, values = zip(*(rank[batch_size] for rank in ranks), strict=True)
        assert sorted(chain(*seen)) == [0, 1, 2, 3, 4]
        assert all(value == {"val_one": 1.0, "val_samples": 5.0, "val_mean": pytest.approx(2.0)} for value in values)


def test_a_logged_constant_stays_what_it_is_on_uneven_ranks(found):
    assert set(found(a_constant)) == {(1.0, 1.0)}


def test_uneven_training_data_finishes_on_all_ranks_with_every_sample_counted(found):
    seen, counted, steps, ends = zip(*found(uneven_samples), strict=True)
    assert sorted(chain(*seen)) == list(range(7))
    assert set(counted) == {7}
    assert set(steps) == {2}
    assert all(end == ends[0] for end in ends)


def test_streams_of_different_length_finish_on_all_ranks_with_every_sample_counted(found):
    seen, counted, steps, ends = zip(*found(uneven_streams), strict=True)
    assert sorted(chain(*seen)) == [*range(8), *range(100, 103)]
    assert set(counted) == {11}
    assert set(steps) == {4}
    assert all(end == ends[0] for end in ends)


def test_predictions_come_in_the_order_of_the_dataset_on_every_rank(found):
    for by_batch_size in found(predictions):
        for batches in by_batch_size:
            assert list(chain(*batches)) == list(range(11))
        assert [list(map(len, batches)) for batches in by_batch_size] == [[1] * 11, [2] * 5 + [1], [4, 4, 3]]


def test_the_batches_of_a_user_are_kept_in_order(found):
    read, times, is_kept = zip(*found(batches_of_the_user), strict=True)
    assert list(chain(*zip(*read, strict=True))) == InOrder().lists
    assert set(times) == {1}
    assert all(is_kept)


def test_ranks_have_different_dropout_and_one_seed(found):
    first, second = zip(*found(dropout), strict=True)
    assert first == second
    masks = list(chain(*first))
    assert len(set(masks)) == len(masks) == 6


def test_global_step_counts_steps_whatever_the_number_of_optimizers(found):
    assert all(counted == (5, [5, 5]) for counted in found(two_optimizers))


def test_a_signal_to_one_rank_stops_all_at_a_step_saves_and_loses_nothing(found):
    steps = {stopped[1] for _, stopped, _, _ in found(a_signal_to_rank_one)}
    assert len(steps) == 1
    for undisturbed, stopped, saved, resumed in found(a_signal_to_rank_one):
        assert stopped[0] == 143
        assert undisturbed[1] > stopped[1]
        assert saved == [f"epoch=0-step={stopped[1]}.ckpt"]
        assert undisturbed[0] is resumed[0] is None
        assert resumed == undisturbed


def test_a_signal_to_one_rank_of_a_launched_fit_reaches_the_caller_and_loses_nothing(tmp_path):
    expected = train_saving(tmp_path / "undisturbed", devices=2)
    code, step, _ = train_saving(tmp_path / "signalled", SignalsRankOne(), devices=2)
    assert code == 143
    assert [found.path.name for found in checkpoint.list_checkpoints(tmp_path / "signalled")] == [
        f"epoch=0-step={step}.ckpt"
    ]
    assert train_saving(tmp_path / "signalled", devices=2) == expected


# --- exit codes


def start(*words):
    """Start two ranks of a job as a launcher would; return their exit codes and output."""
    port = free_port()
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    commands = [
        ([sys.executable, JOB, *map(str, words)], {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(2)
    ]
    codes, outputs = zip(*run_together(commands), strict=True)
    return codes, "".join(outputs)


def test_a_job_with_uneven_data_succeeds(tmp_path):
    codes, output = start("uneven", tmp_path)
    assert codes == (0, 0), output
    assert output.count("counted 61") == 2


def test_a_job_whose_last_rank_is_slow_succeeds_on_all(tmp_path):
    codes, output = start("slow", tmp_path)
    assert codes == (0, 0), output


def test_a_job_of_which_one_rank_fails_fails(tmp_path):
    codes, output = start("raise", tmp_path)
    assert all(codes)
    assert "rank 1 has had enough" in output


def test_a_signal_to_one_rank_ends_every_rank_with_143(tmp_path):
    codes, output = start("signal", tmp_path)
    assert codes == (143, 143), output
    (saved,) = checkpoint.list_checkpoints(tmp_path)
    checkpoint.verify(saved.path)
