"""Lines of this package that make the host wait for the device in the steps of a strategy with its defaults."""

import warnings

import simulated_device
from device_matrix import DEVICE, OF_DEVICE
from matrix import GLOBAL_BATCH, NETWORKS, Case, samples
from torch.utils.data import DataLoader

from echelon import Callback, Trainer, seed_everything
from echelon.testing import run_ranks


class Waits(Callback):
    """Counts from the first step in which everything is known, the third, up to the last one."""

    def __init__(self):
        self.found = []
        self.library = simulated_device.library()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2:
            self.library.taken_waits()
            self.library.count_waits(True)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 5:
            self.library.count_waits(False)
            self.found = self.library.taken_waits()


def waits_of_rank(line, settings, case):
    """Train six steps, and return where the host has waited in the last four: what for, and the lines of the stack."""
    warnings.simplefilter("ignore")
    seed_everything(1, verbose=False)
    waits = Waits()
    trainer = Trainer(
        strategy=line.build(),
        accelerator=DEVICE,
        devices=line.devices if line.processes == 1 else "auto",
        max_steps=6,
        callbacks=[waits],
        log_every_n_steps=50,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"precision": "64-true", **settings},
    )
    size = GLOBAL_BATCH * line.sharing // line.processes
    data = samples(6 * GLOBAL_BATCH, 1, line.network)
    if settings.get("precision"):
        data.tensors = tuple(t.float() if t.is_floating_point() else t for t in data.tensors)
    trainer.fit(NETWORKS[line.network](case), DataLoader(data, size))
    assert trainer.global_step == 6
    return waits.found


def waits(title, settings, units=False):
    """Return the waits of each rank, as the lines of the package that are innermost in the stack."""
    line, case = OF_DEVICE[title], Case(units=units)
    arguments = (line, settings, case)
    found = [waits_of_rank(*arguments)] if line.processes == 1 else run_ranks(waits_of_rank, line.processes, *arguments)
    return [[_innermost(wait) for wait in of_rank] for of_rank in found]


def wait_on_purpose():
    """Return the waits of a network that reads its loss."""

    class Reading(NETWORKS["dense"]):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            loss.item()
            return loss

    NETWORKS["reading"] = Reading
    line = OF_DEVICE["single"]
    found = waits_of_rank(line.__class__("single", network="reading"), {}, Case())
    return [wait.partition(" ")[0] for wait in found], [__file__ in wait for wait in found]


def _innermost(wait):
    what, _, stack = wait.partition(" ")
    lines = [line for line in stack.splitlines() if "/torch/" not in line and "<" not in line]
    return f"{what}: {' < '.join(reversed(lines[-3:]))}"
