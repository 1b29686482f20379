"""torchmetrics objects whose lists differ between ranks are gathered whole, also by their copies."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torchmetrics
from as_rank import attempt, calm_down, double_trainer, world_size
from once import once
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.text import ROUGEScore

from echelon import Callback, Engine, TrainModule
from echelon.testing import run_ranks

NUM_SAMPLES = 7


class Kept(torchmetrics.Metric):
    """Keeps rows of whole numbers for each sample, in a list that is concatenated and in one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("joined", [], dist_reduce_fx="cat")
        self.add_state("apart", [], dist_reduce_fx=None)
        self.add_state("named", [], dist_reduce_fx=None)
        self.add_state("total", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, numbers: Tensor) -> None:
        self.joined.append(numbers[:, None].expand(-1, 2))
        self.apart.extend(torch.full((int(number),), int(number)) for number in numbers)
        self.named.extend((int(number), b"of bytes") for number in numbers)
        self.total += numbers.sum()

    def compute(self) -> Tensor:
        joined = torch.cat(list(self.joined)) if isinstance(self.joined, list) else self.joined
        assert len(self.named) == len(self.apart) == len(joined)
        return torch.stack([self.total, joined.sum(), sum(values.sum() for values in self.apart)])


class Module(TrainModule):
    def __init__(self, *, copies: bool = False) -> None:
        super().__init__()
        self.layer, self.kept, self.copies = nn.Linear(1, 1), Kept(), copies
        self.rouge = ROUGEScore(rouge_keys=("rouge1",))
        self.found: Any = None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layer(batch[:, None].double())
        self.kept.update(batch)
        words = [" ".join("abcdefgh"[: int(number)]) for number in batch]
        self.rouge.update(words, ["a b"] * len(words))

    def on_validation_epoch_end(self) -> None:
        kept = copy.deepcopy(self.kept) if self.copies else self.kept
        self.found = kept.compute().tolist(), self.rouge.compute()["rouge1_recall"].item()
        if self.copies:
            assert pickle.loads(pickle.dumps(self.kept)).dist_sync_fn is None  # elsewhere, torchmetrics gathers
        self.kept.reset()


class MadeLate(TrainModule):
    """Gets its metric after its processes have been set up; a callback has one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.held = nn.Linear(1, 1), {}
        self.found: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.held["kept"].update(batch)

    def on_validation_epoch_start(self) -> None:
        self.held["kept"] = Kept()

    def on_validation_epoch_end(self) -> None:
        self.found.append(self.held["kept"].compute().tolist())


class Counts(Callback):
    def __init__(self) -> None:
        self.kept = Kept()

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.kept.update(batch)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        module.found.append(self.kept.compute().tolist())


def computed_elsewhere() -> Any:
    """Return what metrics give that the module does not have when it is set up, and one of a loop."""
    calm_down()
    module, strategy = MadeLate(), "ddp" if world_size() > 1 else "single"
    numbers: Any = torch.arange(1, NUM_SAMPLES + 1)
    trainer = double_trainer(strategy=strategy, callbacks=[Counts()])
    trainer.validate(module, DataLoader(numbers, 2), verbose=False)
    engine, kept = Engine(strategy=strategy, accelerator="cpu"), Kept()
    engine.launch()
    engine.setup(nn.Linear(1, 1))
    loader = engine.setup_dataloaders(DataLoader(numbers, 1))
    for batch in loader:
        if loader.batch_size:
            kept.update(batch)
    return [*module.found, kept.compute().tolist()]


def validated(strategy: str, num_samples: int, *, copies: bool = False) -> Any:
    calm_down()
    module = Module(copies=copies)
    numbers: Any = torch.arange(1, num_samples + 1)
    double_trainer(strategy=strategy).validate(module, DataLoader(numbers, 2), verbose=False)
    return module.found


NUMBERS = (2, 3, 7)


def found_here() -> dict[Any, Any]:
    """Return what this rank finds in each case, or its error."""
    strategy = "ddp" if world_size() > 1 else "single"
    cases: dict[Any, Any] = {number: partial(validated, strategy, number) for number in NUMBERS}
    cases |= {"elsewhere": computed_elsewhere, "copied": partial(validated, strategy, 8, copies=True)}
    return {name: attempt(case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def found() -> Any:
    """Return what each of a number of ranks finds; they start once."""
    return once(lambda num_ranks: run_ranks(found_here, num_ranks, timeout=120))


@pytest.mark.parametrize("num_samples", NUMBERS)
def test_lists_of_which_ranks_have_different_numbers_or_none_are_gathered_whole(num_samples: int, found: Any) -> None:
    total = num_samples * (num_samples + 1) / 2
    squares = sum(number**2 for number in range(1, num_samples + 1))
    alone = found(1)[0][num_samples]
    assert alone[0] == [total, 2 * total, squares], alone
    for rank in found(2):
        assert not isinstance(rank[num_samples], str), rank[num_samples]
        numbers, recall = rank[num_samples]
        assert numbers == alone[0]
        assert recall == pytest.approx(alone[1])


def test_a_copy_of_a_metric_gathers_like_it(found: Any) -> None:
    for rank in found(2):
        assert rank["copied"][0] == [36, 72, 204], rank["copied"]


def test_metrics_that_the_module_does_not_have_are_gathered_whole(found: Any) -> None:
    alone = found(1)[0]["elsewhere"]
    assert alone == [[28, 56, 140]] * 3
    assert [rank["elsewhere"] for rank in found(2)] == [alone] * 2
