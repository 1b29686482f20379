"""Callbacks where several ranks hold one replica: what they count counts once, and all ranks decide the same."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from as_rank import calm_down, double_trainer
from recording_logger import RecordingLogger
from shared_replicas import SharedReplicas
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, TrainModule, seed_everything
from echelon.callbacks import (
    BasePredictionWriter,
    EMAWeightAveraging,
    LossSpikePolicy,
    MemoryReport,
    ModelCheckpoint,
    NaNGuard,
    SampleLedger,
    StragglerMonitor,
    ThroughputMonitor,
)
from echelon.callbacks.samples.audit import audit_ledger, samples_folder
from echelon.common.errors import NonFiniteError
from echelon.testing import run_ranks

SIZE = 2  # ranks that hold a replica


def data(num_samples=36):
    x = torch.arange(2.0 * num_samples, dtype=torch.float64).reshape(-1, 2).sin()
    return TensorDataset(x, x.sum(1, keepdim=True) * 0.5)


class Net(TrainModule):
    """A regression; `disturb` maps a step to what rank 3 multiplies its loss, or its gradients, with."""

    def __init__(self, of_losses=None, of_gradients=None):
        super().__init__()
        seed_everything(1, verbose=False)
        self.net = nn.Linear(2, 1, dtype=torch.float64)
        self.of_losses, self.of_gradients = of_losses or {}, of_gradients or {}

    def _factor(self, factors):
        return factors.get(self.trainer.global_step, 1.0) if self.trainer.strategy.rank == 3 else 1.0

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True)
        return loss * self._factor(self.of_losses)

    def on_after_backward(self):
        for parameter in self.net.parameters():
            parameter.grad.mul_(self._factor(self.of_gradients))

    def predict_step(self, batch, batch_idx):
        return batch[1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def trainer_of(*callbacks, strategy=None, **settings):
    calm_down()
    return double_trainer(
        **{
            "strategy": strategy or SharedReplicas(SIZE),
            "max_epochs": 1,
            "num_sanity_val_steps": 0,
            "callbacks": list(callbacks),
            "enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
            **settings,
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def found(folder):
    """Return a function that returns what the ranks have found in a case; one launch is for all."""
    ranks = run_ranks(all_cases, 4, folder, timeout=300)

    def of(name):
        results = [rank[name] for rank in ranks]
        for error in (result for result in results if isinstance(result, Exception)):
            raise error
        return results

    return of


def all_cases(folder):
    calm_down()
    cases = {"count": (count, folder / "count"), "save": (save, folder / "save")}
    for of in ("of_losses", "of_gradients"):
        cases |= {f"nan {of}": (stop_at_nan, of), f"spike {of}": (judge, of)}
    cases |= {f"average {has_average}": (average, has_average) for has_average in (False, True)}
    return {name: kept(*case) for name, case in cases.items()}


def kept(function, argument):
    """Return a result or an error, which ends the test of its case alone."""
    try:
        return function(argument)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return error


# --- what is counted --------------------------------------------------------------------------------------------------


class Writer(BasePredictionWriter):
    """Notes on which samples it is called."""

    def __init__(self):
        super().__init__("batch_and_epoch")
        self.batches, self.epochs = [], []

    def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.batches += batch_indices

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        self.epochs += [index for indices in batch_indices[0] for index in indices]


def count(folder):
    logger, writer = RecordingLogger(str(folder)), Writer()
    trainer = trainer_of(
        ThroughputMonitor(lambda batch: len(batch[0]), lambda batch: 10 * len(batch[0])),
        SampleLedger(),
        StragglerMonitor(every_n_steps=2),
        memory := MemoryReport(),
        writer,
        logger=logger,
        log_every_n_steps=3,
        default_root_dir=folder,
    )
    trainer.fit(Net(), DataLoader(data(), batch_size=6))
    predictions = trainer.predict(Net(), DataLoader(data(7), batch_size=2))
    return {
        "samples": logger.series("throughput/samples")[-1:],
        "tokens": logger.series("throughput/tokens")[-1:],
        "seen": trainer.samples_seen,
        "clocks": logger.names("time/compute/"),
        "memory": memory.measured,
        "written": (sorted(writer.batches), writer.epochs),
        "predicted": torch.cat(predictions).flatten().tolist(),
    }


def test_samples_are_counted_once_and_ranks_one_by_one(found):
    results = found("count")
    first = results[0]
    assert first["samples"] == [(3, 36.0)] and first["tokens"] == [(3, 360.0)]
    assert first["clocks"] == {f"time/compute/rank_{rank}" for rank in range(4)}
    assert [result["seen"] for result in results] == [36] * 4
    assert all(result["memory"] == first["memory"] for result in results)
    assert all(result["predicted"] == data(7).tensors[1].flatten().tolist() for result in results)
    assert [result["written"][0] for result in results] == [[0, 1, 4, 5], [], [2, 3, 6], []]
    assert [result["written"][1] for result in results] == [list(range(7)), [], [], []]


def test_a_ledger_has_one_file_for_each_data_rank(found, folder):
    found("count")
    folder = samples_folder(folder / "count")
    assert [path.name[-15:] for path in sorted(folder.glob("*.samples"))] == ["k_00000.samples", "k_00001.samples"]
    found = audit_ledger(folder)
    assert found.is_exact and [epoch.used for epoch in found.epochs] == [36]


# --- what all ranks decide alike --------------------------------------------------------------------------------------


def stop_at_nan(of):
    module = Net(**{of: {1: float("nan")}})
    with pytest.raises(NonFiniteError) as caught:
        trainer_of(NaNGuard()).fit(module, DataLoader(data(), batch_size=6))
    return str(caught.value)


@pytest.mark.parametrize(("of", "text"), [("of_losses", "Rank 3: The loss is"), ("of_gradients", "Rank 3: The grad")])
def test_what_is_not_finite_on_a_part_of_a_replica_ends_the_run_on_all_ranks(of, text, found):
    messages = found(f"nan {of}")
    assert len(set(messages)) == 1 and messages[0].startswith(text), messages


def judge(of):
    policy, module = LossSpikePolicy(warmup=1), Net(**{of: {3: 1e6}})
    trainer_of(policy, max_epochs=2).fit(module, DataLoader(data(), batch_size=3))
    return json.dumps(policy.decisions), [p.tolist() for p in module.parameters()]


@pytest.mark.parametrize("of", ["of_losses", "of_gradients"])
def test_a_spike_on_a_part_of_a_replica_is_one_of_all_ranks(of, found):
    results = found(f"spike {of}")
    assert all(result == results[0] for result in results)
    assert [decision["global_step"] for decision in json.loads(results[0][0])] == [3]


class Late(Callback):
    """Lets the clocks of ranks differ, and keeps which checkpoints each knows."""

    def on_train_step_end(self, trainer, module):
        trainer.strategy.barrier()


def save(folder):
    logging.getLogger("echelon").setLevel(logging.ERROR)
    saver = ModelCheckpoint(folder, monitor="loss_step", save_top_k=2, every_n_train_steps=1)
    trainer = trainer_of(saver, Late(), default_root_dir=folder)
    trainer.fit(Net(), DataLoader(data(), batch_size=6))
    return saver.best_model_path, sorted(map(str, saver.best_k_models))


def test_checkpoints_of_replicas_are_those_of_rank_0(found):
    results = found("save")
    assert len(set(map(str, results))) == 1 and len(results[0][1]) == 2


# --- buffers ----------------------------------------------------------------------------------------------------------


class Parts(Net):
    """Has a buffer that is split over the ranks of a replica, and depends on the samples of data ranks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("part", torch.zeros((), dtype=torch.float64))
        self.validated = []

    def training_step(self, batch, batch_idx):
        self.part += 100.0 * (self.trainer.strategy.rank % SIZE) + batch[0].mean()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.part.item())


def average(has_average):
    module, averaging = Parts(), EMAWeightAveraging(decay=0.5)
    trainer = trainer_of(*([averaging] if has_average else []))
    trainer.fit(module, DataLoader(data(), batch_size=6), DataLoader(data(4), batch_size=1))
    return module.validated[-1], module.part.item()


@pytest.mark.parametrize("has_average", [False, True])
def test_buffers_are_those_of_the_first_rank_with_the_same_part(has_average, found):
    first, second, third, fourth = found(f"average {has_average}")
    assert third == first and fourth == second
    assert all(of_second - of_first > 100 for of_first, of_second in zip(first, second, strict=True))
