"""Draws: the random numbers of a step, the same on every stage that runs its code, and others for each part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ..devices.generators import device_generators

States = list[Tensor]


class Draws:
    """Keeps torch's random number streams in step on all stages, which run different parts of one step.

    The step's own code (masks, noise) draws the same numbers on every stage that runs it. Up to the end of the first
    stage they are those of one process, if no part draws, and the next micro-batch continues from there; behind each
    cut they come from a stream of its own. Parts draw from streams of their own (dropout).

    Args:
        device: this rank's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator, *device_generators([device])]
        self._starts: dict[int, States] = {}
        self._key = b""

    def begin(self, position: int) -> None:
        """Begin a window of micro-batches at a position in the run; a resumed run has the same positions."""
        self._starts = {0: self.states()}
        state = self._starts[0][0].numpy().tobytes()
        self._key = hashlib.blake2b(state + position.to_bytes(8, "little"), digest_size=16).digest()

    def begin_micro_batch(self, index: int) -> None:
        """Restore the streams to the start of a micro-batch."""
        self._restore(self._starts[index])

    def cross(self, index: int, stage: int) -> None:
        """Draw the numbers that a micro-batch draws behind a stage; behind the first, note where the next one begins.

        Args:
            index: the micro-batch.
            stage: the stage whose last part has been called, here or elsewhere.
        """
        if stage == 0:
            self._starts.setdefault(index + 1, self.states())
        self._seed(index, f"behind stage {stage}")

    @contextmanager
    def of_part(self, index: int, name: str) -> Iterator[None]:
        """Draw from a part's own stream inside the block."""
        states = self.states()
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

    def states(self) -> States:
        """Return the present states of the streams."""
        return [generator.get_state() for generator in self._generators]

    def _seed(self, index: int, name: str) -> None:
        digest = hashlib.blake2b(f"{index} {name}".encode(), key=self._key, digest_size=8).digest()
        for generator in self._generators:
            generator.manual_seed(int.from_bytes(digest, "little") >> 1)

    def _restore(self, states: States) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
