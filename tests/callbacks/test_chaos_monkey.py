"""ChaosMonkey injects a real fault where it was asked for, once."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from chaos_drill import drill
from programs import ForkedProgram
from scripted import Scripted, batches, trainer_in

from echelon.callbacks import LambdaCallback
from echelon.callbacks.chaos_monkey import ChaosMonkey
from echelon.common.errors import ConfigError, ProcessError
from echelon.strategies.resilience.faults import Chaos
from echelon.testing import run_ranks

DRILL = Path(__file__).with_name("chaos_drill.py")


def steps(folder: Path, rank: int = 0) -> list[int]:
    """Return the steps whose forward has begun, in that order, and forget them."""
    file = folder / f"steps-{rank}"
    found = [int(step) for step in file.read_text().split()]
    file.unlink()
    return found


def fit(folder: Path, text: str, *others: Any, round: int = 0, **settings: Any) -> list[str]:
    """Fit 4 steps in this process; return what the node's agent was asked for."""
    asked: list[str] = []
    monkey = ChaosMonkey(
        Chaos(text),
        folder,
        round=round,
        leave=lambda: asked.append("leave"),
        lose=lambda: asked.append("lose"),
    )
    trainer_in(folder, monkey, *others, **{"max_epochs": 1, **settings}).fit(Scripted(), batches(), batches(4))
    return asked


# --- real faults -----------------------------------------------------------------------------------------------------


def test_a_process_is_stopped_and_killed_at_exactly_the_step_and_only_once(tmp_path: Path) -> None:
    text = "stop:rank=0@step=2, kill:rank=0@step=4"
    words, output = (DRILL, tmp_path, text, "1"), tmp_path / "output"
    process = ForkedProgram(words, folder=tmp_path, environ=os.environ, output=output)
    try:
        end = time.monotonic() + 240
        while Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":  # stopped
            assert process.poll() is None and time.monotonic() < end, output.read_text()
            time.sleep(0.01)
        assert steps(tmp_path) == [1]
        process.send_signal(signal.SIGCONT)
        assert process.wait(240) == -signal.SIGKILL
        assert steps(tmp_path) == [2, 3]
    finally:
        process.kill()
    run_ranks(drill, 1, tmp_path, text, 1)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_a_node_is_killed_with_all_its_workers(tmp_path: Path) -> None:
    text = "kill:node=0@step=3"
    with pytest.raises(ProcessError, match="SIGKILL"):
        run_ranks(drill, 2, tmp_path, text, 2)
    assert steps(tmp_path, 0) == [1, 2]
    assert steps(tmp_path, 1)[:2] == [1, 2]
    run_ranks(drill, 2, tmp_path, text, 2)
    assert steps(tmp_path, 0) == steps(tmp_path, 1) == [1, 2, 3, 4, 5]


def test_a_process_ends_with_its_code(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="7"):
        run_ranks(drill, 1, tmp_path, "exit:rank=0+code=7@step=5", 1)
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_an_error_is_raised_once_for_each_of_two_equal_events(tmp_path: Path) -> None:
    text = "raise:rank=0@step=3, raise:rank=0@step=3"
    for _ in range(2):
        with pytest.raises(RuntimeError, match="'raise:rank=0@step=3'"):
            fit(tmp_path, text)
    fit(tmp_path, text)


def test_a_slow_rank_sleeps_before_each_step(tmp_path: Path) -> None:
    began = time.monotonic()
    fit(tmp_path, "slow:rank=0+ms=30@step=3")
    assert time.monotonic() - began >= 2 * 0.03


def test_a_process_that_hangs_lives(tmp_path: Path) -> None:
    with pytest.raises(ProcessError, match="SIGKILL"):
        run_ranks(drill, 1, tmp_path, "kill:rank=0+delay=0.2@step=3, hang:rank=0@step=3", 1)
    assert steps(tmp_path) == [1, 2]


# --- the points ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("point", "round", "expected"),
    [
        ("step=1", 0, ["leave"]),
        ("step=4", 0, ["leave"]),
        ("step=5", 0, []),
        ("start=0", 0, ["leave"]),
        ("start=1", 0, []),
        ("start=1", 1, ["leave"]),
        ("validation=2", 0, ["leave"]),
        ("validation=3", 0, []),
        ("checkpoint=2", 0, ["leave"]),
        ("checkpoint=3", 0, []),
    ],
)
def test_every_point_is_reached_once(tmp_path: Path, point: str, round: int, expected: list[str]) -> None:
    def save(trainer: Any, module: Any) -> None:
        if trainer.global_step % 2 == 0:
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    settings = {"val_check_interval": 2, "num_sanity_val_steps": 1}
    saving = LambdaCallback(on_train_step_end=save)
    assert fit(tmp_path, f"leave:rank=0@{point}", saving, round=round, **settings) == expected
    assert fit(tmp_path, f"leave:rank=0@{point}", round=round, **settings) == []


def test_an_event_of_another_rank_or_node_does_not_happen_here(tmp_path: Path) -> None:
    assert fit(tmp_path, "leave:rank=1@step=1, lose:node=1@step=2, raise:rank=7@start=0") == []


def test_a_step_begins_with_its_first_micro_batch(tmp_path: Path) -> None:
    order: list[Any] = []
    monkey = ChaosMonkey(Chaos("leave:rank=0@step=2"), tmp_path, leave=lambda: order.append("leave"))
    note = LambdaCallback(on_train_batch_start=lambda trainer, module, batch, index: order.append(index))
    trainer_in(tmp_path, monkey, note, max_epochs=1, accumulate_grad_batches=2).fit(Scripted(), batches())
    assert order == [0, 1, "leave", 2, 3]


def test_an_event_may_come_later_than_its_point(tmp_path: Path) -> None:
    left = threading.Event()
    monkey = ChaosMonkey(Chaos("leave:rank=0+delay=0.01@step=1"), tmp_path, leave=left.set)
    trainer_in(tmp_path, monkey, max_epochs=1).fit(Scripted(), batches())
    assert left.wait(240)


# --- at random -------------------------------------------------------------------------------------------------------


def test_random_faults_go_on_where_the_worker_before_has_left_off(tmp_path: Path) -> None:
    text = "random:seed=1+actions=leave@seconds=0-0"
    assert fit(tmp_path, text) == ["leave"] * 4
    assert fit(tmp_path, text, round=1) == ["leave"] * 4
    assert {path.name for path in tmp_path.glob("fault-random-*")} >= {f"fault-random-{i}" for i in range(8)}


def test_random_faults_keep_their_distance_from_the_first_step_of_a_round_too(tmp_path: Path) -> None:
    assert fit(tmp_path, "random:seed=1+actions=leave@seconds=0-0") == ["leave"] * 4
    long_ago = time.time() - 1001
    for mark in tmp_path.glob("fault-random-*"):
        os.utime(mark, (long_ago, long_ago))
    assert fit(tmp_path, "random:seed=1+actions=leave@seconds=1000-1000", round=1) == []


# --- what cannot be --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ["leave", "lose"])
@pytest.mark.parametrize("text", ["{}:rank=0@step=1", "kill:rank=1@step=1, random:seed=1+actions=stop/{}@seconds=1-2"])
def test_what_needs_an_agent_is_refused_without_one(tmp_path: Path, text: str, action: str) -> None:
    chaos = Chaos(text.format(action))
    with pytest.raises(ConfigError, match=f"chaos='{re.escape(str(chaos))}' has '{action}', which needs a node"):
        ChaosMonkey(chaos, tmp_path)
