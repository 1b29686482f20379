"""Ranks that hold parts of one replica: what they count counts once, and what all must agree on reaches all."""

from __future__ import annotations

import copy
from importlib.util import find_spec

import pytest
import torch
from as_rank import attempt, calm_down, double_trainer, world_size
from once import once
from shared_replicas import SharedReplicas
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from echelon import Loss, TrainModule, seed_everything
from echelon.common.errors import DataError
from echelon.testing import run_ranks

NUM_SAMPLES = 36
BATCH_SIZE = 12  # of all ranks; 3 steps
ONE_REPLICA = pytest.mark.only_in_sweep  # which is less than the two replicas of four ranks
LAYOUTS = pytest.mark.parametrize(("num_ranks", "size"), [pytest.param(2, 2, marks=ONE_REPLICA), (4, 2)])

needs_torchmetrics = pytest.mark.skipif(find_spec("torchmetrics") is None, reason="torchmetrics is not installed")


def data(num_samples=NUM_SAMPLES):
    x = torch.arange(2.0 * num_samples, dtype=torch.float64).reshape(-1, 2).sin()
    return TensorDataset(x, x.sum(1, keepdim=True) * 0.5)


def trainer_of(size, **settings):
    """A trainer of replicas that `size` ranks share; in one process, of one replica."""
    calm_down()
    strategy = SharedReplicas(size) if world_size() > 1 else "single"
    return double_trainer(**{"strategy": strategy, "max_epochs": 1, "num_sanity_val_steps": 0, **settings})


def loader(size=2, num_samples=NUM_SAMPLES):
    """A loader whose batches of all ranks together have `BATCH_SIZE` samples."""
    return DataLoader(data(num_samples), batch_size=BATCH_SIZE // max(world_size() // size, 1))


CASES = {}
"""Runs that are compared with one process: function and arguments, by name."""
OF_RANKS = {}
"""Those that mean something on several ranks only: the numbers of ranks, function and arguments."""


def run_cases(cases, size):
    """Return the result of each case on this rank, or its error."""
    return {name: attempt(function, size, *args) for name, (function, *args) in cases.items()}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Return the results of all cases on each of a number of ranks, which start once."""

    def run(num_ranks):
        resumed = {"resumed": (resume_an_epoch, tmp_path_factory.mktemp("resumed") / "a.ckpt")}
        of_ranks = {name: case for name, (numbers, *case) in OF_RANKS.items() if num_ranks in numbers}
        return run_ranks(run_cases, num_ranks, CASES | resumed | of_ranks, 2)

    return once(run)


def assert_on_ranks(ends, name, num_ranks, expected):
    """Compare what a case returns on each rank with what is expected there."""
    assert [end[name] for end in ends(num_ranks)] == expected


def at_rank_0_and_alone(ends, name, num_ranks):
    """Return what a case returns on several ranks, which must be equal on all, and in one process."""
    of_ranks, (alone,) = ([copy.deepcopy(end[name]) for end in ends(number)] for number in (num_ranks, 1))
    assert not isinstance(of_ranks[0], str) and not isinstance(alone, str), f"{of_ranks}\n{alone}"
    assert all(result == of_ranks[0] for result in of_ranks), of_ranks
    return of_ranks[0], alone


class Small(TrainModule):
    def __init__(self):
        super().__init__()
        seed_everything(1, verbose=False)
        self.net = nn.Linear(2, 1, dtype=torch.float64)

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


# --- self.log ---------------------------------------------------------------------------------------------------------


class Logging(Small):
    def __init__(self):
        super().__init__()
        self.by_hand = 0.0

    def training_step(self, batch, batch_idx):
        num = len(batch[0])
        loss = self.loss(batch)
        epoch = {"on_step": False, "on_epoch": True}
        self.log("samples", num, reduce_fx="sum", **epoch)
        self.log("samples_in_step", float(num), reduce_fx="sum", on_step=True)
        self.log("loss", loss, **epoch)
        self.log("largest", batch[0].max(), reduce_fx="max", **epoch)
        self.log("number", float(num), reduce_fx=lambda values: values.sum(), **epoch)
        self.log("of_rank_zero", float(num), reduce_fx="sum", rank_zero_only=True, **epoch)
        if self.trainer.is_global_zero:  # as Lightning's users write it
            self.log("only_here", 3.0, reduce_fx="sum", rank_zero_only=True, **epoch)
        self.by_hand += self.trainer.strategy.reduce(float(num), "sum")
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("validated", len(batch[0]), reduce_fx="sum")
        self.log("val_loss", self.loss(batch))


def log_everything(size):
    trainer, module = trainer_of(size, log_every_n_steps=1), Logging()
    trainer.fit(module, loader(size), DataLoader(data(7), batch_size=2))
    values = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {**values, "by_hand": module.by_hand}


CASES["logged"] = (log_everything,)


@LAYOUTS
def test_what_is_logged_counts_each_replica_once(num_ranks, size, ends):
    found, alone = at_rank_0_and_alone(ends, "logged", num_ranks)
    assert alone["samples"] == NUM_SAMPLES
    alone["of_rank_zero"] /= num_ranks // size  # of the samples that rank 0 had
    assert found == pytest.approx(alone, abs=1e-12)


class Torchmetrics(Small):
    def __init__(self):
        super().__init__()
        import torchmetrics

        self.total, self.by_hand = torchmetrics.SumMetric(), torchmetrics.SumMetric()
        self.elsewhere = [torchmetrics.SumMetric()]

    def training_step(self, batch, batch_idx):
        num = len(batch[0])
        for metric in (self.total, self.by_hand, *self.elsewhere):
            metric(num)
        self.log("total", self.total, on_step=False, on_epoch=True)
        self.log("elsewhere", self.elsewhere[0], on_step=False, on_epoch=True)
        return self.loss(batch)

    def on_train_epoch_end(self):
        self.log("by_hand", self.by_hand.compute())
        self.copied = self.by_hand.clone().compute().item()


def log_torchmetrics(size):
    trainer, module = trainer_of(size), Torchmetrics()
    trainer.fit(module, loader(size))
    return {**{name: value.item() for name, value in trainer.callback_metrics.items()}, "copied": module.copied}


CASES |= {"torchmetrics": (log_torchmetrics,)} if find_spec("torchmetrics") else {}


@needs_torchmetrics
@LAYOUTS
def test_torchmetrics_gather_from_each_replica_once(num_ranks, size, ends):
    found, alone = at_rank_0_and_alone(ends, "torchmetrics", num_ranks)
    assert found == alone == dict.fromkeys(("total", "elsewhere", "by_hand", "copied"), NUM_SAMPLES)


def resume_an_epoch(size, path):
    """Save inside an epoch, and resume: what all ranks had logged until then counts once."""
    first = trainer_of(size, max_steps=2)
    first.fit(Logging(), loader(size))
    first.save_checkpoint(path)
    trainer = trainer_of(size)
    trainer.fit(Logging(), loader(size), ckpt_path=path)
    return {name: trainer.callback_metrics[name].item() for name in ("samples", "loss", "largest", "number")}


@LAYOUTS
def test_what_was_logged_before_a_resume_counts_once(num_ranks, size, ends):
    found, alone = at_rank_0_and_alone(ends, "resumed", num_ranks)
    assert alone["samples"] == NUM_SAMPLES
    assert found == pytest.approx(alone, abs=1e-12)


# --- losses -----------------------------------------------------------------------------------------------------------


class Counting(Small):
    """Counts units that differ from sample to sample, and asks for the loss of each step."""

    def __init__(self):
        super().__init__()
        self.totals = []

    def training_step(self, batch, batch_idx):
        units = (batch[0][:, :1].abs() * 4).round() + 1
        return Loss(((self.net(batch[0]) - batch[1]).square() * units).sum(), units.sum())

    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        self.totals.append(closure().item())
        optimizer.step()


def count_units(size, module_class, num_samples):
    module = module_class()
    trainer_of(size).fit(module, loader(size, num_samples))
    return [*module.net.weight.flatten().tolist(), *getattr(module, "totals", [])]


COUNTED = {
    f"{kind.__name__}, {number} samples": (count_units, kind, number)
    for kind in (Counting, Small)
    for number in (NUM_SAMPLES, NUM_SAMPLES + 1)
}
CASES |= COUNTED


@LAYOUTS
@pytest.mark.parametrize("name", COUNTED)
def test_counts_of_losses_are_those_of_one_process(num_ranks, size, name, ends):
    found, alone = at_rank_0_and_alone(ends, name, num_ranks)
    assert found == pytest.approx(alone, abs=1e-12)


class InParts(Small):
    """Each rank of a replica has the loss of its part of each sequence, here one of two columns."""

    def part(self):
        strategy = self.trainer.strategy
        return slice(None) if world_size() == 1 else slice(strategy.rank % 2, strategy.rank % 2 + 1)

    def training_step(self, batch, batch_idx):
        errors = ((batch[0] - self.net(batch[0])).square() * torch.tensor([1.0, 3.0]))[:, self.part()]
        units = (batch[0].abs() * 4).round()[:, self.part()] + 1
        self.log("units", units.sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        return Loss((errors * units).sum(), units.sum())


def cut_sequences(size):
    module, trainer = InParts(), trainer_of(size)
    if world_size() > 1:
        trainer = trainer_of(size, strategy=SharedReplicas(size, cuts_sequences=True))
    trainer.fit(module, loader(size))
    return [*module.net.weight.flatten().tolist(), trainer.callback_metrics["units"].item()]


CASES["parts"] = (cut_sequences,)


@LAYOUTS
def test_parts_of_sequences_count_by_their_units(num_ranks, size, ends):
    found, alone = at_rank_0_and_alone(ends, "parts", num_ranks)
    assert found == pytest.approx(alone, abs=1e-12)


# --- data -------------------------------------------------------------------------------------------------------------


class Dealing(IterableDataset):
    """Deals samples to the ranks as it is told: by the data rank, or by the rank."""

    def __init__(self, trainer, by):
        self.trainer, self.by = trainer, by

    def __iter__(self):
        strategy = self.trainer.strategy
        place = {
            "data_rank": (strategy.data_rank, strategy.data_size),
            "rank": (strategy.rank, strategy.world_size),
            "length": (strategy.data_rank, strategy.data_size),
        }[self.by]
        samples = list(data())[place[0] :: place[1]]
        return iter(samples[: -2 * strategy.rank or None] if self.by == "length" else samples)


def read_an_iterable(size, by):
    trainer, module = trainer_of(size), Logging()
    source = Dealing(trainer, by)
    trainer.fit(module, DataLoader(source, batch_size=2))
    return trainer.callback_metrics["samples"].item()


def refuse_an_iterable(size, by, text):
    with pytest.raises(DataError, match=text):
        read_an_iterable(size, by)


OF_RANKS["dealt"] = (2, 4), read_an_iterable, "data_rank"


@LAYOUTS
def test_an_iterable_that_deals_by_data_rank_is_read_once(num_ranks, size, ends):
    assert_on_ranks(ends, "dealt", num_ranks, [NUM_SAMPLES] * num_ranks)


TEXT = r"Ranks 0 and 1 hold parts of one replica, whose loaders must give both the same batches"
OF_RANKS["dealt by rank"] = (2, 4), refuse_an_iterable, "rank", TEXT


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=ONE_REPLICA), 4])
def test_an_iterable_that_deals_by_rank_is_an_error_in_the_first_step(num_ranks, ends):
    assert_on_ranks(ends, "dealt by rank", num_ranks, [None] * num_ranks)


LONGER = r"Ranks 2 and 3 hold parts of one replica, .* got counts \[1.0, 2.0\] and \[0.0, 0.0\] of batches"
OF_RANKS["other lengths"] = (4,), refuse_an_iterable, "length", LONGER


def test_streams_of_other_lengths_inside_a_replica_are_an_error_when_one_ends(ends):
    assert_on_ranks(ends, "other lengths", 4, [None] * 4)


def evaluate_an_iterable(size, by):
    trainer = trainer_of(size)
    (found,) = trainer.validate(Logging(), DataLoader(Dealing(trainer, by), batch_size=3), verbose=False)
    return found["validated"]


def refuse_an_evaluation(size):
    with pytest.raises(DataError, match="Ranks 0 and 1 hold parts of one replica"):
        evaluate_an_iterable(size, "rank")


OF_RANKS["evaluated"] = (4,), evaluate_an_iterable, "data_rank"
OF_RANKS["evaluated by rank"] = (4,), refuse_an_evaluation


def test_an_evaluation_compares_its_first_batch_too(ends):
    assert_on_ranks(ends, "evaluated", 4, [NUM_SAMPLES] * 4)
    assert_on_ranks(ends, "evaluated by rank", 4, [None] * 4)


class Sampled(Logging):
    """Builds a DistributedSampler, with the trainer's numbers or with torch's own of all ranks."""

    def __init__(self, by):
        super().__init__()
        self.by = by

    def train_dataloader(self):
        numbers = self.trainer.distributed_sampler_kwargs if self.by == "data_rank" else {}
        return DataLoader(data(), batch_size=3, sampler=DistributedSampler(data(), shuffle=False, **numbers))


def sample_by(size, by):
    trainer = trainer_of(size)
    trainer.fit(Sampled(by))
    return trainer.callback_metrics["samples"].item()


def refuse_a_sampler(size):
    with pytest.raises(
        DataError, match="must divide the data among 2 data ranks|Ranks 0 and 1 hold parts of one replica"
    ):
        sample_by(size, "rank")


OF_RANKS["sampled"] = (2, 4), sample_by, "data_rank"
OF_RANKS["sampled by rank"] = (2, 4), refuse_a_sampler


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=ONE_REPLICA), 4])
def test_a_sampler_with_the_numbers_of_the_trainer_deals_to_the_data_ranks(num_ranks, ends):
    assert_on_ranks(ends, "sampled", num_ranks, [NUM_SAMPLES] * num_ranks)
    assert_on_ranks(ends, "sampled by rank", num_ranks, [None] * num_ranks)


def log_without_syncing(size):
    module, trainer = OfRanks(), trainer_of(size)
    trainer.fit(module, loader(size))
    return trainer.callback_metrics["own"].item(), trainer.callback_metrics["of_all"].item()


class OfRanks(Small):
    def training_step(self, batch, batch_idx):
        rank = float(self.trainer.strategy.rank)
        self.log("own", rank, on_step=False, on_epoch=True, sync_dist=False)
        self.log("of_all", rank, on_step=False, on_epoch=True, reduce_fx="max", sync_dist=True)
        return self.loss(batch)


OF_RANKS["not synced"] = (4,), log_without_syncing


def test_what_is_not_synced_stays_the_own_value_of_each_rank(ends):
    # the first rank of each replica counts, if the ranks that hold it differ
    assert_on_ranks(ends, "not synced", 4, [(0.0, 2.0), (1.0, 2.0), (2.0, 2.0), (3.0, 2.0)])
