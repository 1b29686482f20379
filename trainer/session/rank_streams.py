"""RankStreams: random numbers that differ between ranks in micro-batches, and are the same on all ranks elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Self, TypeVar

import torch
from torch import Tensor

from ...strategies import Strategy
from ...strategies.module.random_streams import RandomStreams, device_generators
from ..data.generators import GENERATORS
from ..data.seed import capture_rng, derive, restore_rng, seed_devices, seed_generators

T = TypeVar("T")

_NOTHING: Final = nullcontext()
_OF_RANKS: Final = 0x72616E6B
"""Keeps the seeds of ranks apart from those of epochs."""
_OF_HOOKS: Final = 0x686F6F6B
"""Keeps the seeds of the common stream apart from them."""


class RankStreams:
    """The random numbers of a rank that reads other samples than the rest.

    Inside ``with streams:``, this rank draws from a stream of its own, for dropout and augmentation. Everywhere else
    all ranks draw the same, as one process does that draws nothing in its steps: hooks that reset layers or add noise,
    and optimizers that draw. With a single data rank, both are the global generators.
    """

    __slots__ = ("_common", "_depth", "_devices", "_generators", "_own", "_seed", "is_parted")

    def __init__(self) -> None:
        self.is_parted = False
        """Whether there are two streams."""
        self._depth = 0
        self._seed = 0
        self._devices: Sequence[torch.device] = ()
        self._generators: list[torch.Generator] = []
        self._own: Any = None
        self._common: Any = None

    @staticmethod
    def are_parted(strategy: Strategy) -> bool:
        """Return whether data ranks will have streams of their own."""
        return strategy.data_size > 1

    def part(self, strategy: Strategy, seed: int) -> None:
        """Begin the streams: the common one goes on from rank 0's generators. Collective: every rank calls it."""
        seed_devices(strategy.devices, seed, 0)
        if not self.are_parted(strategy):
            return
        self._devices, self._generators, self._seed = strategy.devices, device_generators(strategy.devices), seed
        self.meet(strategy)
        self._common, self._own = self._state(), self._state()
        self.is_parted = True
        with self:
            seed_generators(derive(seed, _OF_RANKS, strategy.data_rank))
            seed_devices(self._devices, derive(seed, _OF_RANKS), strategy.data_rank)

    def meet(self, strategy: Strategy) -> None:
        """Take rank 0's common stream, where a hook may have drawn on some ranks only. Collective."""
        if self.are_parted(strategy) and not strategy.collectives.is_rehearsed:
            restore_rng(strategy.collectives.broadcast(capture_rng(strategy.devices)), strategy.devices)

    def restart(self, *place: int) -> None:
        """Begin the common stream again for a place in the run, after hooks that ran less often on some ranks."""
        if self.is_parted:
            seed = derive(self._seed, _OF_HOOKS, *place)
            seed_generators(seed)
            seed_devices(self._devices, seed, 0)

    def __enter__(self) -> Self:
        if self.is_parted:
            if not self._depth:
                self._swap(self._common, self._own)
            self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        if self._depth:
            self._depth -= 1
            if not self._depth:
                self._swap(self._own, self._common)

    def common(self) -> AbstractContextManager[None]:
        """Return the context of a hook or an update inside a micro-batch, in manual optimization."""
        return self._left() if self._depth else _NOTHING

    @contextmanager
    def _left(self) -> Iterator[None]:
        depth, self._depth = self._depth, 0
        self._swap(self._own, self._common)
        try:
            yield
        finally:
            self._swap(self._common, self._own)
            self._depth = depth

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore this rank's own stream on exit."""
        if not self.is_parted:
            yield
            return
        with self:
            before = RandomStreams(self._devices)
        try:
            yield
        finally:
            with self:
                before.rewind()

    def drawing(self, function: Callable[..., T]) -> Callable[..., T]:
        """Return a function that draws from this rank's own stream."""

        def draw(*args: Any, **kwargs: Any) -> T:
            with self:
                return function(*args, **kwargs)

        return draw

    def state_dict(self, devices: Sequence[torch.device]) -> dict[str, Any]:
        """Return the states of the generators: this rank's own, and under ``hooks`` the common ones."""
        with self:
            state = capture_rng(devices)
        return {**state, "hooks": capture_rng(devices)} if self.is_parted else state

    def load_state_dict(self, state: dict[str, Any], devices: Sequence[torch.device]) -> None:
        """Restore what `state_dict` returned in this process."""
        with self:
            restore_rng(state, devices)
        if self.is_parted:
            restore_rng(state["hooks"], devices)

    def _state(self) -> tuple[Any, list[Tensor]]:
        return GENERATORS.new_state(), [generator.get_state() for generator in self._generators]

    def _swap(self, current: tuple[Any, list[Tensor]], other: tuple[Any, list[Tensor]]) -> None:
        """Save the generators in one state, and set them to another."""
        GENERATORS.take(current[0])
        GENERATORS.put(other[0])
        for index, generator in enumerate(self._generators):  # their states are on the host, so nothing waits
            current[1][index] = generator.get_state()
            generator.set_state(other[1][index])
