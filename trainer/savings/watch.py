"""Watch: what looks at one kind of saving during the first steps of a fit, and what it has to go by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ...callbacks.run import Logger
from ...common.process_memory import peak_of_process
from ...strategies import Strategy
from ...strategies.devices.kinds import CPU
from ...strategies.devices.memory import peak_allocated, total_memory
from ...strategies.module.activation_checkpointing import ActivationCheckpointing
from .. import planning


class Watched(Protocol):
    """The trainer as the advice sees it. The trainer satisfies this as well as `Run`."""

    @property
    def strategy(self) -> Strategy:
        """The strategy: device, ranks, precision."""

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers that ``configure_optimizers`` returned."""

    @property
    def callbacks(self) -> Sequence[object]:
        """All callbacks, in the order in which they are called."""

    @property
    def loggers(self) -> Sequence[Logger]:
        """All loggers."""

    @property
    def log_every_n_steps(self) -> int:
        """The interval at which step metrics go to the loggers."""

    @property
    def accumulate_grad_batches(self) -> int:
        """Micro-batches per optimizer step."""

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches per epoch, on the rank with the most; infinity if the length is unknown."""

    @property
    def train_dataloader(self) -> Any:
        """The training loaders, as they were passed or returned."""

    @property
    def datamodule(self) -> object:
        """The data module; None without one."""

    @property
    def checkpoint_seconds(self) -> float:
        """The seconds for which training has waited for checkpoints in this run."""

    @property
    def global_step(self) -> int:
        """The number of optimizer steps completed."""


@dataclass(frozen=True)
class Subject:
    """The run that is watched."""

    run: Watched
    module: nn.Module
    recomputes: ActivationCheckpointing | None
    compiles: bool

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.run.strategy.device

    def held_and_free(self) -> tuple[float, float] | None:
        """Return the bytes of this rank at its fullest moment, and what is free beside it; None if nobody can tell."""
        if self.device.type == CPU:
            ranks_here = self.run.strategy.ranks.environment.local_world_size
            return float(peak_of_process()), planning.memory_of_host() / ranks_here
        total, most = total_memory(self.device), peak_allocated(self.device)
        return None if total is None or not most else (most, total - most)

    @property
    def has_stages(self) -> bool:
        """Whether the module is cut into the stages of a pipeline."""
        return self.run.strategy.ranks.stage.world_size > 1


@dataclass(frozen=True)
class TypicalStep:
    """A typical step of those that were measured, on this rank, in seconds of the host.

    Medians; but the wait for workers, which read several batches at once, is a mean.
    """

    step: float
    """All of a step: the wait for its data, its work, its logs."""
    wait: float
    """From the end of the last step to the data of this one."""
    busy_wait: float
    """The processor time of this process in that wait."""


@dataclass(frozen=True)
class Saving:
    """A change of the program that shortens its steps."""

    kind: str
    """One word for what it saves in."""
    share: float
    """The share of a step that it saves."""
    text: str
    """What was found, what to do, and how the share is known: one sentence."""


class SavingWatch(ABC):
    """Base of watches: `begin`, then `see` and `end_step` for each step that is measured, `savings`, and `end`.

    Nothing of it communicates: it runs on one rank alone.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._handles: list[RemovableHandle] = []
        """Of the hooks that it has added to modules and optimizers."""

    def begin(self) -> None:
        """Begin to look, before the first step that is measured."""

    def see(self, batch: object) -> None:
        """Look at a micro-batch, on its device, before its forward."""

    def end_step(self) -> None:
        """Note that a step has ended."""

    @abstractmethod
    def savings(self, times: TypicalStep) -> Iterator[Saving]:
        """Yield what could be saved, if anything is known."""

    def end(self) -> None:
        """Take away all that `begin` and `see` have added to the run."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
