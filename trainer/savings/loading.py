"""Savings in reading: training that waits for a loader which could read beside it, in workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ...callbacks.callback import Callback
from ...callbacks.dispatch import overrides_method
from ...strategies.cluster.environment import num_cores
from ...strategies.devices.kinds import CPU
from ..module.data_module import DataHooks
from ..module.hooks import ModuleHooks
from .watch import Saving, SavingWatch, TypicalStep

_TRANSFERS: Final = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_BETWEEN: Final = ("on_train_batch_start", "on_train_step_end")
_MOST: Final = 8
"""Workers that are advised where no processor limits them."""
_START: Final = 0.1
"""Seconds in which a worker starts and ends."""
_SENDING: Final = 0.001
"""Seconds in which a batch goes from a worker to this process."""
_BUSY: Final = 0.5
"""Share of the wait from which reading is the work of a processor rather than a wait for a disk or a network."""


class Loading(SavingWatch):
    """Judges the wait for data, which the advisor has measured."""

    def savings(self, times: TypicalStep) -> Iterator[Saving]:
        loader = self.subject.run.train_dataloader
        if not isinstance(loader, DataLoader) or not times.wait or self._has_other_work() or _reads_devices(loader):
            return
        rest, now = times.step - times.wait, loader.num_workers
        is_busy = times.busy_wait >= _BUSY * times.wait and not now
        # what it takes to read one step's batches in one worker
        reading = times.step * now if now else times.wait
        wanted = math.ceil(reading / max(rest, 1e-9))
        # of more than processors torch warns; the samples of a stream are read by each worker, and dealt
        most = 1 if isinstance(loader.dataset, IterableDataset) else min(_MOST, num_cores())
        workers = min(wanted, most, self._free_processors() if is_busy or now else most)
        if workers <= now:
            return
        share = 1 - (max(rest, reading / workers) + self._costs(workers - now)) / times.step
        held = f"num_workers={now}" if now else "the DataLoader has no workers"
        yield Saving(
            "loader",
            share,
            f"{times.wait / times.step:.0%} of each step is a wait for its data, and {held}. "
            f"DataLoader(..., num_workers={workers}) reads beside the steps, which makes them {share:.0%} shorter "
            f"(reading takes {1000 * reading:.3g} ms a step, the rest {1000 * rest:.3g} ms).",
        )

    def _has_other_work(self) -> bool:
        """Return whether hooks of the user's do work between the steps, where the wait was measured."""
        module, datamodule = self.subject.module, self.subject.run.datamodule
        owners = [module] if datamodule is None else [module, datamodule]
        if any(overrides_method(owner, name, DataHooks) for owner in owners for name in _TRANSFERS):
            return True
        if overrides_method(module, "on_train_step_end", ModuleHooks):
            return True
        own = __name__.partition(".")[0]
        others = [one for one in self.subject.run.callbacks if type(one).__module__.partition(".")[0] != own]
        return any(overrides_method(one, name, Callback) for one in others for name in _BETWEEN)

    def _costs(self, more: int) -> float:
        """Return the seconds that more workers cost a step: batches are sent, and each epoch starts processes."""
        loader, run = self.subject.run.train_dataloader, self.subject.run
        number = run.accumulate_grad_batches
        starts = 0.0 if getattr(loader, "persistent_workers", False) else _START * more / run.num_training_batches
        return number * (starts + (_SENDING if not loader.num_workers else 0.0))

    def _free_processors(self) -> int:
        """Return how many processors of this node each rank has beside those that its steps use."""
        used = torch.get_num_threads() if self.subject.device.type == CPU else 1
        return max(0, int(num_cores() // self.subject.run.strategy.ranks.environment.local_world_size - used))


def _reads_devices(loader: DataLoader[object]) -> bool:
    """Return whether the data set holds tensors on a device, which workers cannot read."""
    held = getattr(loader.dataset, "__dict__", {}).values()
    parts = [part for value in held for part in (value if isinstance(value, list | tuple) else [value])[:_MOST]]
    return any(isinstance(part, Tensor) and part.device.type != CPU for part in parts)
