"""A tour of mistakes that show only on two ranks, and of ways to interrupt a program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet, samples
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from tour import Mistake, Tour

from echelon import CollectiveError, ConfigError, DataError, DDPStrategy, Loss, ModuleError, ProcessError, RunError
from echelon.testing import run_ranks

tour = Tour()


def fit(module: Any, data: Any = None, **settings: Any) -> None:
    quiet(**{"max_epochs": 1, "strategy": "ddp", "devices": 2, **settings}).fit(module, data or loader(8, 2))


@tour.answered_by(
    CollectiveError,
    "differ in the operation",
    "0    | barrier",
    "1    | all_gather_object",
    "Make the same call on all ranks",
)
def a_collective_on_one_rank() -> None:
    class OneRank(Regression):
        def on_train_start(self) -> None:
            if self.global_rank == 0:
                self.trainer.strategy.barrier()

    fit(OneRank(), strategy=DDPStrategy(check_collectives=True, timeout=timedelta(seconds=5)))


class Early(Regression):
    """Calls collectives on one rank only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 0:
            self.all_gather(torch.ones(3))
        return super().training_step(batch, batch_idx)


class Late(Regression):
    """The same, where the other rank has left training."""

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            self.trainer.strategy.barrier()


@tour.answered_by(
    CollectiveError,
    "diverged at collective",
    "0    | all_gather | ",
    "test_tour_of_ranks.py",
    "1    | (none)     | last: ",
    "Make the same calls in the same order on all ranks",
)
def a_collective_of_one_rank_in_a_step() -> None:
    fit(Early(), strategy=DDPStrategy(timeout=timedelta(seconds=3)))


@tour.answered_by(
    CollectiveError, "0    | barrier ", "test_tour_of_ranks.py", "1    |", "look for a branch that depends on the rank"
)
def a_barrier_of_one_rank_at_the_end() -> None:
    fit(Late(), strategy=DDPStrategy(timeout=timedelta(seconds=3)))


@tour.answered_by(
    CollectiveError, "differ in the operation", "replica_guard.py", "reduction.py", "Make the same call on all ranks"
)
def a_checkpoint_on_one_rank() -> None:
    class OneRank(Regression):
        def on_train_end(self) -> None:
            if self.global_rank == 0:
                self.trainer.save_checkpoint("x.ckpt")

    fit(OneRank(), strategy=DDPStrategy(check_collectives=True, timeout=timedelta(seconds=5)))


@tour.answered_by(ValueError, "no such class", "Raised on rank 1 of 2")
def an_error_on_one_rank() -> None:
    class Raises(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 1:
                raise ValueError("no such class: 11")
            return super().training_step(batch, batch_idx)

    fit(Raises())


@tour.answered_by(ProcessError, "Rank 1 of 2", "exit code 3")
def a_rank_that_exits() -> None:
    class Exits(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_rank == 1:
                os._exit(3)
            return super().training_step(batch, batch_idx)

    fit(Exits())


@tour.answered_by(ModuleError, "training_step returned None on rank 1 of 2", "Loss(0 * loss, 0)")
def a_batch_skipped_on_one_rank() -> None:
    class Skips(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if self.global_rank == 0 else None

    fit(Skips())


@tour.answered_by(ModuleError, "a Loss on ranks [0] and a tensor on ranks [1]", "on all ranks, or on none")
def a_loss_of_another_kind_on_one_rank() -> None:
    class Mixed(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return Loss(loss * 2, 2) if self.global_rank == 0 else loss

    fit(Mixed())


@tour.answered_by(ConfigError, "module.lock (lock) cannot be sent", "create it in setup()")
def a_module_that_cannot_travel() -> None:
    module = Regression()
    module.lock = threading.Lock()  # type: ignore[assignment]
    fit(module)


@tour.answered_by(ModuleError, "spare.weight, spare.bias", "find_unused_parameters=True")
def parameters_that_a_step_does_not_use() -> None:
    class Unused(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(2, 1)

    fit(Unused())


@tour.answered_by(DataError, "2 data ranks, got num_replicas=4", "self.trainer.strategy.data_size")
def a_sampler_for_other_ranks() -> None:
    data = samples()
    fit(Regression(), DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=4, rank=0)))


@tour.answered_by(RunError, "self.all_gather", "(3, 2) on rank 0 and (2, 2) on rank 1", "pad it")
def gathered_tensors_of_two_sizes() -> None:
    class Gathers(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.all_gather(torch.ones(3 - self.global_rank, 2))
            return super().training_step(batch, batch_idx)

    fit(Gathers())


@pytest.fixture(scope="module", autouse=True)
def _fork_server() -> None:
    """Start what forks processes, whose import of torch is not the time of an answer."""
    run_ranks(int, 1)


@pytest.mark.timeout(60, func_only=True)
@tour.cases
def test_a_mistake_of_ranks_is_answered(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mistake.check()


INTERRUPTED = """
import os, signal, sys
sys.path.insert(0, {helpers!r})
from small import Regression, loader
import echelon

program = os.getpid()

class Stopped(Regression):
    def on_train_batch_end(self, *args):
        if self.global_step == 2 and self.global_rank == 0:
            os.kill(program, signal.SIGINT)

silent = dict(enable_progress_bar=False, enable_model_summary=False)
def fit(strategy, devices):
    trainer = echelon.Trainer(max_epochs=5000, accelerator="cpu", devices=devices, strategy=strategy, **silent)
    trainer.fit(Stopped(), loader())

try:
    fit("single", 1)
except KeyboardInterrupt:
    sys.excepthook(*sys.exc_info())
fit("ddp", 2)
"""


@pytest.mark.only_in_sweep  # around_fit has sigint under most strategies
def test_ctrl_c_says_where_to_go_on_without_a_traceback(tmp_path: Path) -> None:
    """A program shows the interrupt of one process as its end would, and ends with that of ranks."""
    # a separate interpreter, as only that shows how a program ends
    command = [sys.executable, "-c", INTERRUPTED.format(helpers=str(Path(__file__).parents[2] / "helpers"))]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=440)
    assert ended.returncode == -signal.SIGINT
    assert "Traceback" not in ended.stderr
    told = [line for line in ended.stderr.strip().splitlines() if line.startswith("KeyboardInterrupt")]
    assert len(told) == 2, ended.stderr
    assert told[-1] == ended.stderr.strip().splitlines()[-1]
    for line in told:
        assert line.startswith("KeyboardInterrupt: Training ended at a step boundary; resume with fit(..., ckpt_path='")
        assert Path(tmp_path, line.split("'")[1]).is_dir()
