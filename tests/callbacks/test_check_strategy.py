"""Callbacks that cannot run on several processes or devices are refused before any process starts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from small import Regression, loader, quiet, raises

from echelon import Callback, ConfigError, ModelCheckpoint, OnExceptionCheckpoint
from echelon.strategies import Strategy


class Alone(Callback):
    """A user's callback that works in one process only."""

    def check_strategy(self, strategy: Strategy, world_size: int, num_devices: int) -> None:
        if world_size > 1:
            raise ConfigError(f"Alone needs one process, got {world_size}; set devices=1.")


class BringsItAlong(Regression):
    def configure_callbacks(self) -> Any:
        return Alone()


CALLBACKS = [
    pytest.param(OnExceptionCheckpoint("at"), "OnExceptionCheckpoint needs world_size=1, got 2", id="on_exception"),
    pytest.param(
        ModelCheckpoint(save_on_exception=True), "save_on_exception=True needs world_size=1, got 2", id="model"
    ),
    pytest.param(Alone(), "Alone needs one process, got 2", id="own"),
]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "elastic"])
@pytest.mark.parametrize(("callback", "said"), CALLBACKS)
def test_several_processes_are_refused_before_any_starts(
    callback: Callback, said: str, strategy: str, tmp_path: Path
) -> None:
    module = Regression()
    module.lock = threading.Lock()  # cannot be sent to another process
    trainer = quiet(tmp_path, max_epochs=1, strategy=strategy, devices=2, enable_checkpointing=True, callbacks=callback)
    with raises(ConfigError, said):
        trainer.fit(module, loader())


def test_what_only_the_processes_know_is_refused_there(tmp_path: Path) -> None:
    with raises(ConfigError, "Alone needs one process, got 2"):
        quiet(tmp_path, max_epochs=1, strategy="ddp", devices=2).fit(BringsItAlong(), loader())


def test_several_devices_of_one_process_are_another_matter(tmp_path: Path) -> None:
    settings = {"max_epochs": 1, "strategy": "dp", "devices": 2}
    quiet(tmp_path, callbacks=[Alone(), OnExceptionCheckpoint(tmp_path / "at")], **settings).fit(Regression(), loader())
