"""Lines of this package that make the host wait for the device in the steps of a strategy with its defaults."""

import os
import warnings

import simulated_device
from matrix import GLOBAL_BATCH, NETWORKS, Case, Line, samples
from torch.utils.data import DataLoader

from echelon import Callback, Trainer, seed_everything


class Waits(Callback):
    """Counts from the third step, when everything is known, to the fifth; after the last one, replicas are compared.

    Not with hooks around batches: for one at their end, a pipeline reads each loss to show it on all stages.
    """

    def __init__(self):
        self.found = []
        self.library = simulated_device.library()

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == 2:
            self.library.taken_waits()
            self.library.count_waits(True)
        if trainer.global_step == 5:
            self.library.count_waits(False)
            self.found = self.library.taken_waits()


def waits_of_steps(line, network=None):
    """Train six steps on devices, in one of the line's processes; return where the host has waited in three of them.

    Each is what was waited for, and the innermost lines of the stack that are not torch's.
    """
    warnings.simplefilter("ignore")
    seed_everything(1, verbose=False)
    waits = Waits()
    trainer = Trainer(
        strategy=line.build(),
        accelerator=os.environ["ECHELON_TEST_DEVICE"],
        devices=line.devices if line.processes == 1 else "auto",
        precision="64-true",
        max_steps=6,
        accumulate_grad_batches=line.pieces,
        gradient_clip_val=0.1,
        callbacks=[waits],
        log_every_n_steps=50,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    size = GLOBAL_BATCH * line.sharing // line.processes // line.pieces
    data = samples(6 * GLOBAL_BATCH, 1, line.network)
    trainer.fit((network or NETWORKS[line.network])(Case()), DataLoader(data, size))
    assert trainer.global_step == 6
    return [_innermost(wait) for wait in waits.found]


class Reading(NETWORKS["dense"]):
    """Reads its loss in each step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        loss.item()
        return loss


def waits_on_purpose():
    """Return the waits of a network that reads its loss."""
    return waits_of_steps(Line("single"), Reading)


def _innermost(wait):
    what, *stack = wait.splitlines()
    lines = [line for line in stack if "/torch/" not in line and "<" not in line]
    return f"{what}: {' < '.join(reversed(lines[-3:]))}"
