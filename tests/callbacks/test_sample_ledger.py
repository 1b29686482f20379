"""The ledger records what every rank trained on, and proves that each sample came once, whatever happened."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from echelon import (
    Callback,
    CombinedLoader,
    CSVLogger,
    ModelCheckpoint,
    SampleLedger,
    Trainer,
    TrainModule,
    seed_everything,
)
from echelon.callbacks.samples.audit import Audit, audit_ledger
from echelon.callbacks.samples.file import SampleRecord, read_header, read_records
from echelon.common.errors import ProcessError
from echelon.strategies import ElasticStrategy
from echelon.testing import run_ranks


class Numbers(Dataset[Any]):
    """Samples that know their index, and are changed at random when they are read."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return int(index), torch.rand(2, dtype=torch.float64) + random.random()


class Streamed(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(index, torch.rand(2, dtype=torch.float64)) for index in range(11)])


class Linear(TrainModule):
    """Notes which samples it saw in which epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1).double()
        self.seen: list[tuple[int, list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        while isinstance(batch, dict) or isinstance(batch[0], list):  # of several loaders the first
            batch = batch["a"] if isinstance(batch, dict) else batch[0]
        indices, x = batch
        self.seen.append((self.trainer.current_epoch, torch.as_tensor(indices).reshape(-1).tolist()))
        return self.net(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Stop(Exception):  # noqa: N818 - nothing is wrong
    """What ends a run, in place of a kill."""


class At(Callback):
    """Does something on one rank after a step."""

    def __init__(self, step: int, action: Callable[[Any], None], rank: int = 0) -> None:
        self.step, self.action, self.rank = step, action, rank

    def on_train_step_end(self, trainer: Any, module: nn.Module) -> None:
        if trainer.global_step == self.step and trainer.strategy.rank == self.rank:
            self.step = -1
            self.action(trainer)


def die(trainer: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(trainer: Any) -> None:
    raise Stop


def fit(
    folder: Path,
    loader: Any,
    *callbacks: Callback,
    kind: Any = Linear,
    devices: int = 1,
    ckpt_path: Any = None,
    **settings: Any,
) -> Any:
    """Train two epochs with a checkpoint every two steps; return the module."""
    seed_everything(0, verbose=False)
    module = kind()
    trainer = Trainer(
        **{
            "strategy": "ddp" if devices > 1 else "single",
            "devices": devices,
            "accelerator": "cpu",
            "max_epochs": 2,
            "logger": CSVLogger(folder, "csv", version=0),
            "default_root_dir": folder,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **settings,
        },
        callbacks=[*callbacks, ModelCheckpoint(every_n_train_steps=2, save_top_k=-1, save_last=True)],
    )
    with suppress(Stop):
        trainer.fit(module, loader, ckpt_path=ckpt_path)
    return module


def loader(num_samples: int = 23, batch_size: int = 3, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(num_samples), **{"batch_size": batch_size, "shuffle": True, **options})


def samples(folder: Path) -> Path:
    return folder / "csv" / "version_0" / "samples"


def audited(folder: Path) -> Audit:
    found = audit_ledger(samples(folder))
    assert found.faults == []
    return found


def verdicts(folder: Path) -> list[tuple[int, str]]:
    return [(epoch.used, epoch.verdict) for epoch in audited(folder).epochs]


def noted(folder: Path) -> list[SampleRecord]:
    return [record for path in sorted(samples(folder).iterdir()) for record in read_records(path) if record.loader >= 0]


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any], list[tuple[int, str]]]] = {
    "shuffled": (loader, {}, [(23, "exact")] * 2),
    "in order": (lambda: loader(shuffle=False), {}, [(23, "exact")] * 2),
    "accumulated": (loader, {"accumulate_grad_batches": 3}, [(23, "exact")] * 2),
    "of a global batch size": (loader, {"global_batch_size": 7}, [(23, "exact")] * 2),
    "read ahead by workers": (lambda: loader(num_workers=2), {"accumulate_grad_batches": 2}, [(23, "exact")] * 2),
    "drop_last": (lambda: loader(drop_last=True), {"accumulate_grad_batches": 2}, [(18, "exact")] * 2),
    "limited": (loader, {"limit_train_batches": 5}, [(15, "exact"), (15, "exact so far")]),
    "ready-made batches": (
        lambda: DataLoader(Numbers(23), batch_sampler=BatchSampler(RandomSampler(range(23)), 4, drop_last=False)),
        {},
        [(23, "exact")] * 2,
    ),
    "one by one": (lambda: DataLoader(Numbers(5), batch_size=None), {}, [(5, "exact")] * 2),
    "drawn with repeats": (
        lambda: loader(shuffle=False, sampler=WeightedRandomSampler([0.1] * 20 + [5.0] * 3, 30)),
        {},
        [(30, "exact")] * 2,
    ),
    "streamed": (lambda: DataLoader(Streamed(), batch_size=2), {}, [(11, "counted")] * 2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_ledger_holds_what_the_module_saw(kind: str, tmp_path: Path) -> None:
    make, settings, expected = KINDS[kind]
    module = fit(tmp_path, make(), SampleLedger(), **settings)
    assert verdicts(tmp_path) == expected
    if expected[0][1] != "counted":
        assert [(one.epoch, list(one.indices)) for one in noted(tmp_path)] == module.seen


def test_the_ledger_changes_nothing_of_the_run(tmp_path: Path) -> None:
    without = fit(tmp_path / "without", loader())
    noting = fit(tmp_path / "noting", loader(), SampleLedger())
    assert torch.equal(without.net.weight, noting.net.weight)


class Held(Numbers):
    """Gives its first sample only when the last one was read, by a worker that has given a batch before."""

    def __init__(self, num_samples: int, folder: Path) -> None:
        super().__init__(num_samples)
        self.mark = folder / "read"

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        if index == self.num_samples - 1:
            self.mark.touch()
        while index == 0 and not self.mark.exists():
            os.sched_yield()
        return super().__getitem__(index)


def test_batches_are_trained_on_in_the_order_of_the_sampler_though_the_loader_would_give_any(tmp_path: Path) -> None:
    data: Any = DataLoader(Held(8, tmp_path), 2, num_workers=2, in_order=False)
    module = fit(tmp_path, data, SampleLedger(), max_epochs=1)
    assert [indices for _, indices in module.seen] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [one.indices for one in noted(tmp_path)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_what_several_loaders_give_is_noted_for_each(tmp_path: Path) -> None:
    both = CombinedLoader({"a": loader(23), "b": loader(5, 2)}, "max_size_cycle")
    fit(tmp_path, both, SampleLedger(), accumulate_grad_batches=3)
    found = {(one.key.epoch, one.key.loader, one.key.lap): one for one in audited(tmp_path).epochs}
    assert {key: (one.used, one.verdict) for key, one in found.items()} == {
        **{(epoch, 0, 0): (23, "exact") for epoch in (0, 1)},
        # eight batches besides those three: the third lap ends midway
        **{(epoch, 1, lap): (5, "exact") for epoch in (0, 1) for lap in (0, 1)},
        (0, 1, 2): (4, "exact"),
        (1, 1, 2): (4, "exact so far"),
    }


@pytest.mark.parametrize(("mode", "used"), [("min_size", [9, 5]), ("sequential", [23, 5]), ("max_size", [23, 5])])
def test_what_was_read_beside_an_end_is_not_noted(mode: Any, used: list[int], tmp_path: Path) -> None:
    fit(tmp_path, CombinedLoader([loader(23), loader(5, 2)], mode), SampleLedger(), max_epochs=1)
    assert [one.used for one in audited(tmp_path).epochs] == used
    assert audited(tmp_path).is_exact


class EndsEpoch(Linear):
    """Ends every epoch after three micro-batches, in the middle of a step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 3 else None


def test_a_micro_batch_that_a_hook_leaves_out_is_missing(tmp_path: Path) -> None:
    module = fit(tmp_path, loader(), SampleLedger(), kind=EndsEpoch, accumulate_grad_batches=2)
    first = audited(tmp_path).epochs[0]
    assert (first.used, first.verdict, sum(map(len, first.missing))) == (9, "NOT EXACT", 14)
    assert [(one.epoch, list(one.indices)) for one in noted(tmp_path)] == module.seen


def test_steps_that_are_rolled_back_count_as_skipped(tmp_path: Path) -> None:
    back: list[Any] = [At(5, lambda trainer: trainer.roll_back()), At(7, lambda trainer: trainer.roll_back())]
    fit(tmp_path / "before", loader(), *back, SampleLedger())
    back = [At(5, lambda trainer: trainer.roll_back()), At(7, lambda trainer: trainer.roll_back())]
    fit(tmp_path / "after", loader(), SampleLedger(), *back)
    for order in ("before", "after"):
        first, second = audited(tmp_path / order).epochs
        # back from 5 to 4, and from 7 to 6: the fifth batch, and the eighth with its two samples
        assert (first.used, first.skipped, first.verdict) == (18, 5, "exact")
        assert (second.used, second.verdict) == (23, "exact")


def test_what_a_stopped_run_did_after_its_checkpoint_counts_once(tmp_path: Path) -> None:
    fit(tmp_path, loader(num_workers=2), SampleLedger(), At(3, stop))  # which have read ahead
    assert verdicts(tmp_path) == [(9, "exact so far")]
    fit(tmp_path, loader(), SampleLedger(), At(6, stop), ckpt_path="last")
    fit(tmp_path, loader(), SampleLedger(), At(6, stop), ckpt_path=first_checkpoint(tmp_path))
    fit(tmp_path, loader(), SampleLedger(), ckpt_path="last")
    assert verdicts(tmp_path) == [(23, "exact")] * 2
    header = read_header(max(samples(tmp_path).iterdir()))
    assert [tuple(line) for line in header.history] == [(1, 2, 2), (3, 2, 2)]


def first_checkpoint(folder: Path) -> Path:
    return next((folder / "csv" / "version_0" / "checkpoints").glob("*step=2.ckpt"), Path("none"))


def test_a_ledger_begun_in_mid_run_says_what_it_lacks(tmp_path: Path) -> None:
    fit(tmp_path, loader(), At(5, stop))
    fit(tmp_path, loader(), SampleLedger(), ckpt_path="last")
    found = audit_ledger(samples(tmp_path))
    assert found.faults == ["Steps 1 to 4 are not in the ledger: it begins where a run was resumed."]
    assert [one.verdict for one in found.epochs] == ["NOT EXACT", "exact"]


def test_a_further_fit_is_another_run(tmp_path: Path) -> None:
    ends = At(3, lambda trainer: setattr(trainer, "should_stop", True))
    logger = CSVLogger(tmp_path, "csv", version=0)
    trainer = Trainer(max_epochs=1, logger=logger, callbacks=[SampleLedger(), ends], accelerator="cpu")
    module, data = Linear(), loader()
    trainer.fit(module, data)
    trainer.fit(module, data)
    assert verdicts(tmp_path) == [(23, "exact")]


def killed_alone(folder: Path) -> None:
    fit(folder, loader(), SampleLedger(), At(5, die))


def test_a_run_that_is_killed_and_resumed_uses_every_sample_once(tmp_path: Path) -> None:
    with pytest.raises(ProcessError):
        run_ranks(killed_alone, 1, tmp_path)
    fit(tmp_path, loader(), SampleLedger(), ckpt_path="last")
    assert verdicts(tmp_path) == [(23, "exact")] * 2


def test_ranks_that_are_killed_and_become_more_and_fewer_use_every_sample_once(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"global_batch_size": 12, "max_epochs": 2}
    with pytest.raises(ProcessError):
        fit(tmp_path, loader(61), SampleLedger(), At(3, die, rank=1), devices=2, **settings)
    fit(tmp_path, loader(61), SampleLedger(), At(5, stop), devices=1, ckpt_path="last", **settings)
    fit(tmp_path, loader(61), SampleLedger(), devices=3, ckpt_path="last", **settings)
    assert verdicts(tmp_path) == [(61, "exact")] * 2
    headers = [read_header(path) for path in sorted(samples(tmp_path).iterdir())]
    assert [(one.attempt, one.data_rank, one.data_size) for one in headers] == [
        (1, 0, 2),
        (1, 1, 2),
        (2, 0, 1),
        (3, 0, 3),
        (3, 1, 3),
        (3, 2, 3),
    ]


def test_an_elastic_run_names_its_rounds(tmp_path: Path) -> None:
    strategy = ElasticStrategy("ddp", snapshot_every=1, chaos="kill:rank=1@step=5")
    fit(tmp_path, loader(61), SampleLedger(), devices=2, strategy=strategy, global_batch_size=12)
    assert verdicts(tmp_path) == [(61, "exact")] * 2
    headers = [read_header(path) for path in sorted(samples(tmp_path).iterdir())]
    assert [(one.attempt, one.round) for one in headers] == [(1, 0), (1, 0), (2, 1), (2, 1)]


def test_ranks_with_samplers_of_their_own_are_audited_each(tmp_path: Path) -> None:
    fit(tmp_path, None, SampleLedger(), devices=2, max_epochs=1, kind=Own)
    found = audited(tmp_path).epochs
    assert [(one.key.stream, one.used, one.verdict) for one in found] == [(0, 12, "exact"), (1, 12, "exact")]


class Own(Linear):
    """Brings a loader whose sampler deals."""

    def train_dataloader(self) -> Any:
        strategy: Any = self.trainer.strategy
        sampler = DistributedSampler(range(23), num_replicas=strategy.data_size, rank=strategy.data_rank)
        return loader(shuffle=False, sampler=sampler)
