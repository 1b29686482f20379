"""Savings in logs: a device that stands still after each logged step, until the host has read the values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from ...strategies.devices.queries import synchronize_device
from ...strategies.devices.streams import has_events, recorded_event
from .watch import Saving, SavingWatch, Subject, TypicalStep

_OFTEN: Final = 10
"""Logged steps that are as rare as that do not matter."""


class Logs(SavingWatch):
    """Measures how long an accelerator has nothing to do between one step and the next."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._ended: object = None
        self._gaps: list[tuple[Any, Any]] = []
        self._is_read_late = False

    @property
    def _looks(self) -> bool:
        run = self.subject.run
        return has_events(self.subject.device) and bool(run.loggers) and 0 < run.log_every_n_steps <= _OFTEN

    def begin(self) -> None:
        if self._looks:
            hooks = (optimizer.register_step_post_hook(self._after) for optimizer in self.subject.run.optimizers)
            self._handles = list(hooks)

    def _after(self, *_: object) -> None:
        self._ended = recorded_event(self.subject.device, enable_timing=True)

    def see(self, batch: object) -> None:
        if self._ended is not None:
            self._gaps.append((self._ended, recorded_event(self.subject.device, enable_timing=True)))
            self._ended = None

    def savings(self, times: TypicalStep) -> Iterator[Saving]:
        if not self._gaps:
            return
        synchronize_device(self.subject.device)
        gap = sum(begin.elapsed_time(end) for begin, end in self._gaps) / 1000 / len(self._gaps)
        every = self.subject.run.log_every_n_steps
        # what the wait for data would leave of it anyway
        share = max(0.0, gap - times.wait) / times.step * (1 - every / 50)
        yield Saving(
            "logs",
            share,
            f"The {self.subject.device.type} stands still for {gap / times.step:.0%} of each step, until the host has "
            f"read what log_every_n_steps={every} writes: log_every_n_steps=50 makes a step {share:.0%} shorter.",
        )
