"""The agent learns from a real fit where it is, how far it has come, and when torch compiles."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Scripted, batches, trainer_in
from torch import Tensor
from torch._dynamo.callback import callback_handler

from echelon.callbacks import LambdaCallback
from echelon.callbacks.heartbeat import Heartbeat
from echelon.strategies.resilience.heartbeat import Beat, BeatRecord, Phase, make_records, read_record, set_until


class Agent:
    """Reads the records of one worker from within its hooks."""

    def __init__(self, folder: Path) -> None:
        self.records = make_records(folder, 1)
        self.heartbeat = Heartbeat(Beat(folder, 0))
        self.seen: list[tuple[str, Phase, int | None]] = []

    @property
    def record(self) -> BeatRecord:
        return read_record(self.records, 0)

    def spy(self, *hooks: str) -> LambdaCallback:
        def remember(hook: str) -> Any:
            return lambda *_: self.seen.append((hook, self.record.phase, self.record.step))

        return LambdaCallback(**{hook: remember(hook) for hook in hooks})


def test_after_a_step_a_worker_waits_until_its_agent_is_heard_again(tmp_path: Path) -> None:
    agent, is_heard, seen = Agent(tmp_path), threading.Event(), list[bool]()

    def hear() -> None:
        is_heard.set()
        set_until(agent.records, math.inf)

    def silence(*_: Any) -> None:  # as ranks that log together may be cut off there
        set_until(agent.records, 0.0)
        threading.Timer(0.2, hear).start()

    spy = LambdaCallback(on_train_batch_end=silence, on_train_step_end=lambda *_: seen.append(is_heard.is_set()))
    trainer_in(tmp_path, agent.heartbeat, spy, max_steps=1, max_epochs=-1).fit(Scripted(), batches())
    assert seen == [True]


def test_each_hook_finds_the_phase_that_it_is_in(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    spy = agent.spy(
        "on_fit_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_validation_batch_end",
        "on_validation_end", "on_train_step_end", "on_train_epoch_end", "on_train_end", "on_fit_end",
    )  # fmt: skip
    trainer = trainer_in(tmp_path, agent.heartbeat, spy, max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(Scripted(), batches(8), batches(2))
    assert agent.seen == [
        ("on_fit_start", Phase.START, 0),
        ("on_train_epoch_start", Phase.BETWEEN, 0),
        ("on_train_batch_start", Phase.TRAIN, 0),
        ("on_train_batch_end", Phase.TRAIN, 0),
        ("on_train_batch_start", Phase.TRAIN, 0),
        ("on_train_batch_end", Phase.BETWEEN, 1),
        ("on_train_step_end", Phase.BETWEEN, 1),
        ("on_train_batch_start", Phase.TRAIN, 1),
        ("on_train_batch_end", Phase.TRAIN, 1),
        ("on_train_batch_start", Phase.TRAIN, 1),
        ("on_train_batch_end", Phase.BETWEEN, 2),
        ("on_validation_batch_end", Phase.EVALUATE, 2),
        ("on_validation_end", Phase.BETWEEN, 2),
        ("on_train_epoch_end", Phase.BETWEEN, 2),
        ("on_train_step_end", Phase.BETWEEN, 2),
        ("on_train_end", Phase.END, 2),
        ("on_fit_end", Phase.END, 2),
    ]


def test_an_error_leaves_the_step(tmp_path: Path) -> None:
    class Failing(Scripted):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise ValueError("no")

    agent = Agent(tmp_path)
    with pytest.raises(ValueError, match="no"):
        trainer_in(tmp_path, agent.heartbeat, agent.spy("teardown"), max_epochs=1).fit(Failing(), batches(2))
    assert agent.seen == [("teardown", Phase.BETWEEN, 0)]


def test_compilation_is_told_and_no_longer_listened_to_after_the_run(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    while_compiling: list[bool] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        while_compiling.append(agent.record.is_compiling)
        return graph.forward

    class Compiled(Scripted):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.compile(self.net, backend=backend)

    before = list(callback_handler.start_callbacks)
    spy = LambdaCallback(on_train_batch_end=lambda *_: while_compiling.append(agent.record.is_compiling))
    trainer_in(tmp_path, agent.heartbeat, spy, max_epochs=1).fit(Compiled(), batches(2))
    assert while_compiling == [True, False]
    assert callback_handler.start_callbacks == before
