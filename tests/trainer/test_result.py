"""The end of a fit in other processes: how room is made for whole weights there, and what hooks still find."""

import gc
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet, raises

from echelon import Callback, ModelCheckpoint, RunError
from echelon.trainer.result import _make_room


class SavesLast(Callback):
    """Saves a checkpoint in the last hook of all."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        trainer.save_checkpoint(self.path)


class Adapts(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


class TearsDown(Regression):
    def teardown(self, stage: str) -> None:
        pass


def state_after(module: Regression, *callbacks: Callback) -> int:
    optimizer = torch.optim.Adam(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    session: Any = SimpleNamespace(module=module, callbacks=callbacks, datamodule=None, optimizers=[optimizer])
    _make_room(session)
    assert all(parameter.grad is None for parameter in module.parameters())
    return len(optimizer.state)


def test_the_state_of_optimizers_makes_room_unless_a_hook_of_the_user_may_read_it(tmp_path: Path) -> None:
    assert state_after(Regression(), ModelCheckpoint(tmp_path)) == 0
    assert state_after(Regression(), SavesLast(tmp_path)) == 2
    assert state_after(TearsDown()) == 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_checkpoint_that_the_last_hook_saves_is_whole(strategy: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    settings: dict[str, Any] = {"strategy": strategy, "devices": 2}
    torch.manual_seed(0)
    whole, stopped, resumed = Adapts(), Adapts(), Adapts()
    stopped.load_state_dict(whole.state_dict())
    quiet(max_epochs=2).fit(whole, loader(16, 4))
    quiet(max_epochs=1, callbacks=[SavesLast(path)], **settings).fit(stopped, loader(16, 2))
    quiet(max_epochs=2, **settings).fit(resumed, loader(16, 2), ckpt_path=path)
    for one, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_checkpoint_saved_after_a_fit_without_checkpoints_resumes_as_one_of_the_fit_would(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, folder = tmp_path / "after.ckpt", tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    settings: dict[str, Any] = {"strategy": strategy, "devices": 2}
    torch.manual_seed(0)
    whole, stopped, resumed = Adapts(), Adapts(), Adapts()
    stopped.load_state_dict(whole.state_dict())
    quiet(max_epochs=2).fit(whole, loader(16, 4))
    trainer = quiet(max_epochs=1, **settings)
    trainer.fit(stopped, loader(16, 2))
    trainer.save_checkpoint(path)
    assert len(list(folder.iterdir())) == 1
    del trainer, stopped
    gc.collect()
    assert list(folder.iterdir()) == []
    quiet(max_epochs=2, **settings).fit(resumed, loader(16, 2), ckpt_path=path)
    for one, other in zip(resumed.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other)


class HoldsMuch(Adapts):
    """Gives the optimizer a state of more than a gigabyte, which takes no memory."""

    def on_train_end(self) -> None:
        optimizer: Any = self.optimizers()
        optimizer.state[self.net.weight]["much"] = torch.zeros(()).expand((1 << 28) + 1)


def test_a_large_state_of_optimizers_is_not_written_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    trainer = quiet(max_epochs=1, strategy="ddp", devices=2)
    trainer.fit(HoldsMuch(), loader(16, 2))
    assert list(folder.iterdir()) == []
    with raises(RunError, "The state of the optimizers is gone", "pass weights_only=True"):
        trainer.save_checkpoint(tmp_path / "after.ckpt")
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
