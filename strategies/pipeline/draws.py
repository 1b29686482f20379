"""Draws: the random numbers of a step, the same on every stage up to the first cut, different on each after it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..module.random_streams import device_generators

States = list[Tensor]


class Draws:
    """Keeps torch's random number streams in step on all stages, which run different parts of one step.

    Up to the end of the first stage, every stage runs the step's own code (masks, noise) with the same numbers, and the
    next micro-batch continues from there; parts draw from streams of their own (dropout). If no part draws, the numbers
    are those of one process.

    Args:
        device: this rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator, *device_generators([device])]
        self._starts: dict[int, States] = {}
        self._key = b""

    def begin(self, position: int) -> None:
        """Begin a window of micro-batches at a position in the run; a resumed run has the same positions."""
        self._starts = {0: self._states()}
        state = self._starts[0][0].numpy().tobytes()
        self._key = hashlib.blake2b(state + position.to_bytes(8, "little"), digest_size=16).digest()

    def begin_micro_batch(self, index: int) -> None:
        """Restore the streams to the start of a micro-batch."""
        self._restore(self._starts[index])

    def end_first_stage(self, index: int, stage: int) -> None:
        """Note where the next micro-batch begins, and draw other numbers from here on."""
        self._starts.setdefault(index + 1, self._states())
        self.go_behind_first_stage(index, stage)

    def go_behind_first_stage(self, index: int, stage: int) -> None:
        """Draw the numbers of a stage from here on, those that a micro-batch draws behind the first one."""
        self._seed(index, f"stage {stage}")

    @contextmanager
    def of_part(self, index: int, name: str) -> Iterator[None]:
        """Draw from a part's own stream inside the block."""
        states = self._states()
        self._seed(index, name)
        try:
            yield
        finally:
            self._restore(states)

    def end(self, number: int) -> None:
        """Restore the streams to the start of the micro-batch after `number` of them, if it is known."""
        if number in self._starts:
            self._restore(self._starts[number])
        self._starts.clear()

    def _seed(self, index: int, name: str) -> None:
        digest = hashlib.blake2b(f"{index} {name}".encode(), key=self._key, digest_size=8).digest()
        for generator in self._generators:
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)

    def _states(self) -> States:
        return [generator.get_state() for generator in self._generators]

    def _restore(self, states: States) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
