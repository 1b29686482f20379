"""User state returns from a checkpoint ready to use; state of another model or optimizer is explained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, DataModule, Trainer, TrainModule
from echelon.common.errors import CheckpointError
from echelon.testing import run_ranks


class Generated:
    """Has its own generator, whose state is in a checkpoint."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def draw(self) -> float:
        """Return the next number, and stay where it is."""
        state = self.generator.get_state()
        value = torch.rand((), generator=self.generator).item()
        self.generator.set_state(state)
        return value

    def state(self) -> dict[str, Any]:
        """Return the content for a checkpoint."""
        return {"generator": self.generator.get_state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken."""
        self.generator.set_state(state["generator"])


class Net(TrainModule):
    """Draws in each step, and keeps its generators in each of the ways that there are."""

    def __init__(self, width: int = 4, optimizer: Callable[..., Any] = torch.optim.AdamW) -> None:
        super().__init__()
        self.net = nn.Linear(width, 1)
        self.optimizer = optimizer
        self.extra, self.hook = Generated(), Generated()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(3, generator=self.extra.generator)
        torch.rand(4, generator=self.hook.generator)
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), 0.01)

    def get_extra_state(self) -> Tensor:
        return self.extra.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        self.extra.generator.set_state(state)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = self.hook.state()

    def on_load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        self.hook.load(checkpoint["mine"])


class Drawing(Callback):
    """Draws in each step."""

    def __init__(self) -> None:
        self.own = Generated()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.rand(5, generator=self.own.generator)

    def state_dict(self) -> dict[str, Any]:
        return self.own.state()

    def load_state_dict(self, state_dict: Any) -> None:
        self.own.load(state_dict)


class Data(DataModule):
    """Draws in each epoch."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.own = Generated()
        self.width = width

    def train_dataloader(self) -> Any:
        torch.rand(9, generator=self.own.generator)
        return DataLoader(TensorDataset(torch.ones(16, self.width)), batch_size=4)

    def state_dict(self) -> dict[str, Any]:
        return self.own.state()

    def load_state_dict(self, state_dict: Any) -> None:
        self.own.load(state_dict)


def fit(folder: Path, strategy: str, max_steps: int, *, resume: bool) -> list[float]:
    """Train, save, and return what each generator would draw next."""
    module, callback, data = Net(), Drawing(), Data()
    trainer = a_trainer(folder, max_steps, strategy=strategy, callbacks=[callback])
    trainer.fit(module, data, ckpt_path=folder / "a.ckpt" if resume else None)
    if not resume:
        trainer.save_checkpoint(folder / "a.ckpt")
    return [own.draw() for own in (module.extra, module.hook, callback.own, data.own)]


def a_trainer(folder: Path, max_steps: int, **settings: Any) -> Trainer:
    return Trainer(
        max_steps=max_steps,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        **settings,
    )


def save_and_resume(folder: str, strategy: str) -> list[list[float]]:
    """Return the draws of a run that saves, of one that resumes where that ended, and of one that trains on."""
    path = Path(folder)
    steps = [(2, False), (2, True), (3, True)]
    return [fit(path, strategy, max_steps, resume=resume) for max_steps, resume in steps]


@pytest.mark.parametrize(("strategy", "world_size"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_the_state_of_a_generator_goes_on_wherever_it_was_kept(strategy: str, world_size: int, tmp_path: Path) -> None:
    for saved, resumed, trained_on in run_ranks(save_and_resume, world_size, str(tmp_path), strategy):
        assert len(set(saved)) == 4
        assert resumed == saved
        assert all(trained_on[index] != saved[index] for index in range(3))


def resume(folder: Path, module: Net, width: int = 4) -> None:
    a_trainer(folder, 3).fit(module, Data(width), ckpt_path=folder / "a.ckpt")


def test_a_checkpoint_of_another_width_names_the_parameters_and_both_shapes(tmp_path: Path) -> None:
    fit(tmp_path, "single", 2, resume=False)
    with pytest.raises(CheckpointError, match=r"net\.weight: the module has \(1, 6\), the weights have \(1, 4\)"):
        resume(tmp_path, Net(6), 6)


def sgd(parameters: Any, lr: float) -> Any:
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def test_a_checkpoint_of_another_optimizer_names_both(tmp_path: Path) -> None:
    fit(tmp_path, "single", 2, resume=False)
    with pytest.raises(CheckpointError, match=r"SGD.*'momentum'.*saved.*'betas'.*echelon.load_weights"):
        resume(tmp_path, Net(optimizer=sgd))


def test_a_value_that_a_hook_adds_and_no_checkpoint_holds_is_named_with_its_place(tmp_path: Path) -> None:
    class Odd(Net):
        """Keeps an object."""

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"tokens": [1, object()]}

    module, data = Odd(), Data()
    trainer = a_trainer(tmp_path, 1)
    trainer.fit(module, data)
    with pytest.raises(CheckpointError, match=r"state\['mine'\]\['tokens'\]\[1\] is of type object.*store numbers"):
        trainer.save_checkpoint(tmp_path / "a.ckpt")
