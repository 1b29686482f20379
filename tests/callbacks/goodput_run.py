"""A program that trains in a folder and waits to be killed at a given step: ``goodput_run.py FOLDER [STEP]``."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from scripted import Scripted, batches, trainer_in

from echelon import CSVLogger, ModelCheckpoint
from echelon.callbacks.goodput_monitor import GoodputMonitor


class Waiting(Scripted):
    """Stops in the middle of a step until a signal ends it."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.step:
            print("waiting", flush=True)
            signal.pause()
        return super().training_step(batch, batch_idx)


def main(folder: Path, step: int = -1) -> None:
    saving = ModelCheckpoint(every_n_train_steps=5, save_top_k=-1)
    logger = CSVLogger(folder, "csv", version=0)
    trainer = trainer_in(folder, GoodputMonitor(every_seconds=0.0), saving, logger=logger, max_steps=20, max_epochs=-1)
    trainer.fit(Waiting(step), batches(), batches(4), ckpt_path="last")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
