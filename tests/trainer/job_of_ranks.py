"""A program that a launcher starts once for each rank; its exit code tells the truth about the run.

Usage: job_of_ranks.py uneven|raise|signal|slow FOLDER
"""

import os
import signal
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "helpers"))

from small import Regression, loader, quiet

from echelon import Callback, ModelCheckpoint


class Troubles(Callback):
    """Makes rank 1 fail, or get a signal, in the third batch; or be slow at the end."""

    def __init__(self, kind):
        self.kind = kind

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.strategy.rank != 1 or batch_idx != 2:
            return
        if self.kind == "raise":
            raise ValueError("rank 1 has had enough")
        if self.kind == "signal":
            os.kill(os.getpid(), signal.SIGTERM)

    def teardown(self, trainer, module, stage):
        if self.kind == "slow" and trainer.strategy.rank == 1:
            time.sleep(8)
            trainer.strategy.ranks.group.store.check(["late"])  # as the thread does that writes a checkpoint


def main(kind, folder):
    """Train on a number of samples that no number of ranks divides, and report what was done."""
    callbacks = [ModelCheckpoint(folder), Troubles(kind)]
    trainer = quiet(folder, strategy="ddp", max_epochs=1, enable_checkpointing=True, callbacks=callbacks)
    trainer.fit(Regression(), loader(61, 2))
    print(f"rank {trainer.strategy.rank} counted {trainer.samples_seen}")


if __name__ == "__main__":
    main(*sys.argv[1:])
