"""A program for a node of an elastic run: it trains, reports its progress, and is slow when someone waits for it.

Usage: elastic_program.py FOLDER NAME PLAN, where PLAN is a `Plan` as JSON; leaves its weights in FOLDER/NAME.pt.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    Callback,
    CSVLogger,
    DDPStrategy,
    ElasticStrategy,
    FSDPStrategy,
    ModelCheckpoint,
    ParallelStrategy,
    SampleLedger,
    Trainer,
    TrainModule,
    seed_everything,
)

TP_PLAN = {"net.0": "colwise", "net.2": "rowwise"}
_INNER = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "tp": partial(ParallelStrategy, tp=2, tp_plan=TP_PLAN),
    "pp": partial(ParallelStrategy, pp=2, schedule="gpipe"),  # which takes any number of micro-batches
}
SAMPLES, BATCH = 100, 8
STEPS_OF_EPOCH = -(-SAMPLES // BATCH)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run does; nodes of one run differ in `devices` only."""

    epochs: int
    strategy: str = "auto"
    """Inside `ElasticStrategy` where there is a place to meet."""
    nodes: str = "1:2"
    rdzv: str = ""
    devices: int = 1
    snapshot_every: int | None = 3
    checkpoint_every: int = 0
    chaos: str = ""
    start_timeout: float = 240.0
    last_call: float = 1.0
    sleeps: str = ""
    """"ROUND RANK STEP SECONDS": a rank that is late, once."""
    lost_at: str = ""
    """What the node of rank 1 is lost in, in round 0: ``"on_train_end"``, ``"commit"`` (here of rank 0) or not."""
    can_connect: bool = True
    """Whether the workers of this node get as far as meeting their peers."""
    is_tied: bool = False
    """Whether the module is a `TiedRegression`."""
    steps: int = -1
    """The last step, if that comes before the end of the epochs."""
    pause: float = 0.0
    """Seconds added to each step."""
    max_restarts: int = 20


class Regression(TrainModule):
    """A small network in double precision, with a schedule by steps; only the data is random."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)).double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*samples()), BATCH, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(*(part[:16] for part in samples())), 4)


class TiedRegression(Regression):
    """The same with a parameter of two layers, which lie on two stages of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        layers: Any = self.net
        layers[2].bias = layers[0].bias


def samples() -> tuple[Tensor, Tensor]:
    inputs = torch.randn(SAMPLES, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return inputs, inputs.square().sum(1, keepdim=True)


class Unready(DDPStrategy):
    """Fails before it meets the others, which wait for it."""

    def connect(self, *_: Any) -> None:
        raise RuntimeError("this node is not ready")


class Pace(Callback):
    """Reports after every step where the run is; slows down from the step in the file `limit` on.

    The file `steps` has a line for each step that was done: when, in which round, and its number. The run ends at the
    step in the file `last`, once it is there.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan

    def on_fit_start(self, trainer: Any, module: nn.Module) -> None:
        strategy = trainer.strategy
        supervisor = strategy.launcher.supervisor
        own = {"pid": os.getpid(), "node": strategy.node_rank, "agent": supervisor.round.agent}
        self.seen = {"round": supervisor.round.number, "workers": strategy.all_gather_object(own)}

    def on_train_start(self, trainer: Any, module: nn.Module) -> None:
        self.tell(trainer)

    def on_train_batch_start(self, trainer: Any, module: nn.Module, batch: Any, batch_idx: int) -> None:
        word = f"{self.seen['round']} {trainer.strategy.rank} {trainer.global_step + 1} "
        if self.plan.sleeps.startswith(word):
            time.sleep(float(self.plan.sleeps.split()[-1]))

    def on_train_step_end(self, trainer: Any, module: nn.Module) -> None:
        self.tell(trainer)
        if trainer.is_global_zero:
            with (self.folder / "steps").open("a") as file:
                file.write(f"{time.monotonic()} {self.seen['round']} {trainer.global_step}\n")
        last = self.folder / "last"
        if last.exists() and trainer.global_step >= int(last.read_text()):
            trainer.should_stop = True
        time.sleep(self.plan.pause)
        late = trainer.global_step - int((self.folder / "limit").read_text())
        if late >= 0:
            time.sleep(min(1.0, 0.1 + 0.05 * late))

    def on_save_checkpoint(self, trainer: Any, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        if self.is_lost_in("commit", trainer, rank=0) and not trainer.is_taking_snapshot:
            threading.Thread(target=self.lose_in_commit, args=(trainer,), daemon=True).start()

    def on_train_end(self, trainer: Any, module: nn.Module) -> None:
        if self.is_lost_in("on_train_end", trainer, rank=1):
            self.lose(trainer)
            time.sleep(60)  # until the kernel has heard of it

    def tell(self, trainer: Any) -> None:
        if trainer.is_global_zero:
            write(self.folder / "progress", json.dumps({**self.seen, "step": trainer.global_step}))

    def is_lost_in(self, what: str, trainer: Any, *, rank: int) -> bool:
        return (self.plan.lost_at, self.seen["round"], trainer.strategy.rank) == (what, 0, rank)

    def lose(self, trainer: Any) -> None:
        """Kill the agent of this node, and with it its workers."""
        os.kill(trainer.strategy.launcher.supervisor.round.agent, signal.SIGKILL)

    def lose_in_commit(self, trainer: Any) -> None:
        """Lose this node as soon as a checkpoint is being written."""
        folder = Path(trainer.log_dir, "checkpoints")
        while not any(path.is_dir() for path in folder.glob("*")):
            time.sleep(0.001)
        self.lose(trainer)


def write(path: Path, text: str) -> None:
    """Write a small file that others read meanwhile."""
    (part := path.with_name(f"{path.name}.{os.getpid()}.part")).write_text(text)
    part.rename(path)


def train(folder: Path, plan: Plan) -> dict[str, Tensor]:
    """Train and return the weights."""
    seed_everything(1)
    strategy: Any = plan.strategy
    callbacks: list[Callback] = [SampleLedger()]
    if plan.rdzv:
        make = _INNER[plan.strategy] if plan.can_connect else Unready
        strategy = ElasticStrategy(
            make(start_timeout=timedelta(seconds=plan.start_timeout)),
            nodes=plan.nodes,
            rdzv=plan.rdzv,
            max_restarts=plan.max_restarts,
            snapshot_every=plan.snapshot_every,
            last_call=timedelta(seconds=plan.last_call),
            chaos=plan.chaos,
        )
        callbacks.append(Pace(folder, plan))
    if plan.checkpoint_every:
        callbacks.append(ModelCheckpoint(every_n_train_steps=plan.checkpoint_every, save_top_k=-1))
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=plan.devices,
        global_batch_size=BATCH,
        max_epochs=plan.epochs,
        max_steps=plan.steps,
        check_val_every_n_epoch=3,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        callbacks=callbacks,
        logger=CSVLogger(folder, "csv"),
        default_root_dir=folder,
        enable_checkpointing=bool(plan.checkpoint_every),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = TiedRegression() if plan.is_tied else Regression()
    trainer.fit(module)
    return module.state_dict()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(message)s")
    folder, name = Path(sys.argv[1]), sys.argv[2]
    torch.save(train(folder, Plan(**json.loads(sys.argv[3]))), folder / f"{name}.pt")
