"""Mistakes with checkpoints that are asked about in public threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet, raises
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from echelon import CheckpointError, ModelCheckpoint


class Compiled(Regression):
    def __init__(self, compiles: bool = False, hidden: int = 1) -> None:
        super().__init__()
        if compiles:
            self.net = torch.compile(self.net, backend="eager")

    def forward(self, x: Any) -> Any:
        return self.net(x)


@pytest.mark.parametrize("compiles", [False, True])
def test_weights_fit_with_and_without_a_compiled_submodule(compiles: bool, tmp_path: Path) -> None:
    trainer, module = quiet(max_epochs=1), Compiled(compiles)
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    other = Compiled.load_from_checkpoint(tmp_path / "a.ckpt", compiles=not compiles)
    assert torch.equal(next(other.parameters()), next(module.parameters()))
    with pytest.warns(UserWarning, match=r"hiden=4, which Compiled.__init__ does not take.*Did you mean 'hidden'"):
        Compiled.load_from_checkpoint(tmp_path / "a.ckpt", compiles=compiles, hiden=4)
    Compiled.load_from_checkpoint(tmp_path / "a.ckpt", compiles=compiles, unrelated=4)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda state: {"epoch": 1, "state_dict": state}, "pass checkpoint['state_dict']"),
        (lambda state: {f"module.{name}": value for name, value in state.items()}, "DistributedDataParallel adds"),
        (lambda state: {f"_orig_mod.{name}": value for name, value in state.items()}, "torch.compile adds"),
    ],
)
def test_a_state_under_other_names_is_explained(make: Any, text: str) -> None:
    module = Regression()
    with pytest.raises(RuntimeError, match="Missing key") as info:
        module.load_state_dict(make(module.state_dict()))
    assert any(text in note for note in info.value.__notes__)
    with pytest.raises(RuntimeError) as info:
        module.load_state_dict(nn.Linear(3, 4).state_dict())
    assert not hasattr(info.value, "__notes__")


class Scheduled(Regression):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.1)
        return [optimizer], [self.make(optimizer)]


def test_a_schedule_of_another_class_is_refused(tmp_path: Path) -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Scheduled(lambda o: CosineAnnealingLR(o, 1)), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with raises(
        CheckpointError, "The scheduler is StepLR with ['gamma', 'step_size']", "['T_max', 'eta_min']", "load_weights"
    ):
        quiet(max_epochs=2).fit(Scheduled(lambda o: StepLR(o, 1)), loader(), ckpt_path=tmp_path / "a.ckpt")
    quiet(max_epochs=2).fit(Scheduled(lambda o: CosineAnnealingLR(o, 1)), loader(), ckpt_path=tmp_path / "a.ckpt")


class Changing(Regression):
    """Logs a loss that falls, or that rises."""

    def __init__(self, sign: float) -> None:
        super().__init__()
        self.sign = sign

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.sign * self.current_epoch)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_fit_whose_last_weights_are_not_the_best_says_so(sign: float, tmp_path: Path, caplog: Any) -> None:
    saver = ModelCheckpoint(tmp_path, monitor="val_loss")
    with caplog.at_level("INFO"):
        quiet(max_epochs=2, enable_checkpointing=True, callbacks=saver).fit(Changing(sign), loader(), loader())
    assert ("the last step (1): ckpt_path='best' tests the best" in caplog.text) == (sign > 0)
