"""What goes wrong on devices: memory that runs out, a device that is lost, and workers that touch one."""

import os
from functools import partial

import simulated_device
import torch
from device_matrix import DEVICE
from device_training import Net, loader, trainer_on
from torch import nn
from torch.utils.data import DataLoader, Dataset

from echelon import BatchSizeFinder, Callback, TrainModule
from echelon.testing import run_ranks

LARGE = 1 << 20


def said_by(function, *args):
    """Return the type of an error, its text and its notes."""
    try:
        function(*args)
    except BaseException as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "nothing", ""


class Limited(Callback):
    """Limits the memory of this rank's device to what it holds, and little more, from a step on."""

    def __init__(self, step, room=LARGE):
        self.step, self.room = step, room

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.step:
            torch.accelerator.empty_cache()
            held = torch.accelerator.memory_reserved()
            simulated_device.library().set_limit(torch.accelerator.current_device_index(), held + self.room)


class Greedy(Net):
    """Takes more memory than there is in one part of its third step."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def _take(self):
        return torch.ones(8 * LARGE, device=self.device).sum()

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.where == "forward":
            loss = loss + self._take()
        if batch_idx == 2 and self.where == "backward":
            loss.register_hook(lambda gradient: gradient + self._take())
        return loss

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        if self.where == "step":
            number = iter(range(100))
            optimizer.register_step_pre_hook(lambda *_: self._take() if next(number) == 2 else None)
        return optimizer


def out_of_memory(where):
    """Return what is said, and whether the next run in this process works."""
    try:
        said = said_by(trainer_on(DEVICE, callbacks=[Limited(2)]).fit, Greedy(where), loader())
    finally:
        simulated_device.library().set_limit(0, 8 << 30)
    trainer = trainer_on(DEVICE)
    trainer.fit(Net(), loader())
    return said, trainer.global_step


def _on_rank(where):
    callbacks = [Limited(2)] if os.environ["RANK"] == "1" else []
    trainer_on(DEVICE, strategy="ddp", devices="auto", callbacks=callbacks).fit(Greedy(where), loader())


def out_of_memory_on_a_rank(where):
    return said_by(run_ranks, _on_rank, 2, where)


def _with_a_device_on_rank_0(strategy):
    accelerator = DEVICE if os.environ["RANK"] == "0" else "cpu"
    trainer_on(accelerator, strategy=strategy, devices="auto").fit(Net(ties=False), loader())


def unlike_devices(strategy):
    return said_by(partial(run_ranks, timeout=60), _with_a_device_on_rank_0, 2, strategy)


class Wide(TrainModule):
    """Takes memory in proportion to its batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 1)
        self.batch_size = 256

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean() + torch.ones(len(batch[0]), LARGE // 8, device=self.device).sum() * 0

    def train_dataloader(self):
        return DataLoader(loader(512).dataset, self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def found_batch_size():
    """Return the batch size that fits into the memory of a device that is limited."""
    library = simulated_device.library()
    torch.accelerator.empty_cache()
    library.set_limit(0, torch.accelerator.memory_reserved() + 20 * LARGE)
    module = Wide()
    try:
        trainer_on(DEVICE, callbacks=[BatchSizeFinder()], max_steps=1).fit(module)
    finally:
        library.set_limit(0, 8 << 30)
    return module.batch_size


class Losing(Callback):
    """Loses the device of rank 1 in a step."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2 and trainer.strategy.rank == 1:
            simulated_device.library().lose(trainer.strategy.device.index)


def _losing(strategy):
    trainer_on(DEVICE, strategy=strategy, devices="auto", callbacks=[Losing()]).fit(Net(ties=False), loader())


def lost_device(strategy):
    return said_by(run_ranks, _losing, 2, strategy)


def _train_on(strategy, devices):
    trainer = trainer_on(DEVICE, strategy=strategy, devices=devices)
    trainer.fit(Net(ties=False), loader())
    return trainer.global_step


def with_held_devices(folder, strategy, devices):
    """Return what is said where devices have locks in a folder, and the steps of a run, in processes of its own."""
    os.environ["ECHELON_SIMULATED_EXCLUSIVE"] = folder
    steps = []
    try:
        if strategy in ("single", "dp", "device_map"):
            said = said_by(lambda: steps.extend(run_ranks(_train_on, 1, strategy, devices)))
        else:
            said = said_by(lambda: steps.append(_train_on(strategy, devices)))
    finally:
        del os.environ["ECHELON_SIMULATED_EXCLUSIVE"]
    return said, steps


class SavingWhenFull(Callback):
    """Saves a checkpoint, and another when the memory of each rank's device has no room left."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == 2:
            trainer.save_checkpoint(f"{self.folder}/before")
        if trainer.global_step == 3:
            library, index = simulated_device.library(), torch.accelerator.current_device_index()
            torch.accelerator.empty_cache()
            library.set_limit(index, torch.accelerator.memory_reserved())
            try:
                trainer.save_checkpoint(f"{self.folder}/full")
            finally:
                library.set_limit(index, 8 << 30)


def saved_when_full(strategy, folder):
    """Return what is said where devices have no memory left for a save, and the steps of a run that is resumed."""
    settings = {} if strategy == "single" else {"devices": 2}
    if strategy == "pp":
        settings["accumulate_grad_batches"] = 2
    trainer = trainer_on(DEVICE, strategy=strategy, callbacks=[SavingWhenFull(folder)], **settings)
    said = said_by(trainer.fit, Net(ties=False), loader())
    resumed = trainer_on(DEVICE, strategy=strategy, **settings)
    resumed.fit(Net(ties=False), loader(), ckpt_path=f"{folder}/before")
    return said, resumed.global_step


class OnDevice(Dataset):
    """Makes its samples on the device, or leaves that to `collate`."""

    def __init__(self, device):
        self.device = device

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return (torch.full((16,), float(index), dtype=torch.float64, device=self.device),)


def collate(samples):
    return [torch.stack([sample for (sample,) in samples]).to(DEVICE)]


def data_on_a_device(workers, place):
    """Return what is said where the data set or the collate function uses the device, and how many steps there were."""
    trainer = trainer_on(DEVICE)
    data, joins = (OnDevice(DEVICE), None) if place == "data set" else (OnDevice("cpu"), collate)
    said = said_by(trainer.fit, Net(), DataLoader(data, 8, num_workers=workers, collate_fn=joins))
    return said, trainer.global_step
