"""The end of a fit in other processes whose module became another one there: no weight that was trained is lost."""

import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from small import loader, quiet
from torch import nn
from torch.nn.utils import prune

from echelon import Callback, CSVLogger, TrainModule, load_weights

LAUNCHES: list[dict[str, Any]] = [
    {"strategy": "ddp", "devices": 2},
    {"strategy": "fsdp", "devices": 2},
    {"strategy": "elastic", "devices": 1},
]
RESIZED = "no place for 'net.weight_orig', 'net.weight_mask', 'table.weight' ((4, 3) there, (2, 3) here) and 2 more"
IDS = [settings["strategy"] for settings in LAUNCHES]


class Grown(TrainModule):
    """A regression whose last layer is made in ``setup``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 3).double()
        self.table = nn.Embedding(2, 3).double()

    def setup(self, stage: str) -> None:
        if not hasattr(self, "head"):
            torch.manual_seed(5 if stage == "fit" else 6)
            self.head = nn.Linear(3, 1).double()

    def forward(self, x: Any) -> Any:
        return self.head(self.net(x.double()) + self.table.weight[-1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch[0]), batch[1].double())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1].double()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Changes(Callback):
    """Prunes a layer and resizes another one, as a program does in a hook."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if hasattr(module.net, "weight_orig"):
            return
        torch.manual_seed(7 if stage == "fit" else 8)
        prune.random_unstructured(module.net, "weight", amount=2)
        module.table = nn.Embedding(4, 3).double()


class Counts(Callback):
    def __init__(self) -> None:
        self.steps = 0

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.steps = state_dict["steps"]


class CannotBeLoaded(Counts):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise RuntimeError("not here")


class CannotBeAsked(Counts):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not now")


class CannotBeSent(Counts):
    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()}


class StaysThere(CSVLogger):
    """Cannot continue in the folder of the processes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.home = os.getpid()

    def continue_as(self, version: Any) -> None:
        if os.getpid() == self.home:
            raise OSError("gone")
        super().continue_as(version)


def data(batch_size: int) -> Any:
    return loader(8, batch_size)


def trained_alone() -> Grown:
    torch.manual_seed(0)
    module = Grown()
    quiet(max_epochs=2, callbacks=Changes()).fit(module, data(4))
    return module


@pytest.mark.parametrize("settings", LAUNCHES, ids=IDS)
def test_weights_without_a_place_are_named_kept_saved_and_loaded_into_layers_that_setup_makes(settings, tmp_path):
    alone = trained_alone()
    expected = alone.state_dict()
    [validated] = quiet().validate(alone, data(4), verbose=False)
    torch.manual_seed(0)
    module, last = Grown(), Counts()
    # an elastic run asks for these states in each step
    failing = [] if settings["strategy"] == "elastic" else [CannotBeLoaded(), CannotBeAsked(), CannotBeSent()]
    callbacks = [*failing, Changes(), last]
    trainer = quiet(max_epochs=2, callbacks=callbacks, logger=StaysThere(tmp_path), **settings)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, data(4 // settings["devices"]))
    texts = [str(one.message) for one in told]
    assert sum("other weights than Grown has here" in text for text in texts) == 1
    assert any(RESIZED in text and "keeps 'net.weight' as they were before" in text for text in texts)
    for lost in (*(type(callback).__name__ for callback in failing), "The folder of StaysThere"):
        assert sum(f"{lost} did not come back" in text for text in texts) == 1
    assert last.steps == trainer.global_step == 4
    assert {"table.weight", "net.weight_orig", "head.weight"} <= module.unplaced_weights.keys()
    got = {name: value for name, value in module.state_dict().items() if name in expected} | module.unplaced_weights
    torch.testing.assert_close(got, dict(expected), rtol=0, atol=1e-12)
    trainer.save_checkpoint(tmp_path / "all.ckpt", weights_only=True)
    torch.testing.assert_close(load_weights(tmp_path / "all.ckpt"), dict(expected), rtol=0, atol=1e-12)
    with warnings.catch_warnings(action="ignore"):  # setup and the hook make the layers anew there
        [again] = trainer.validate(module, data(4 // settings["devices"]), verbose=False)
    assert again["val"] == pytest.approx(validated["val"], abs=1e-12)


class LeavesOut(TrainModule):
    """Keeps a frozen layer out of its state."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.net = nn.Linear(2, 2), nn.Linear(2, 1)
        self.frozen.requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value for name, value in super().state_dict().items() if not name.startswith("frozen")}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self.net(self.frozen(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def test_a_module_that_leaves_frozen_weights_out_of_its_state_gets_the_others_without_a_word():
    module = LeavesOut()
    before = nn.Module.state_dict(module)["net.weight"].clone()
    frozen = module.frozen.weight.clone()
    quiet(max_epochs=1, strategy="ddp", devices=2).fit(module, data(2))
    assert not torch.equal(before, module.net.weight)
    assert torch.equal(frozen, module.frozen.weight)
    assert not module.unplaced_weights
