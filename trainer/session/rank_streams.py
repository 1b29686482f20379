"""RankStreams: random numbers that differ between ranks in micro-batches, and are the same on all ranks elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Self

import torch
from torch import Tensor

from ...strategies import Strategy
from ...strategies.devices.generators import DeviceGenerator, device_generators
from ...strategies.module.random_streams import RandomStreams
from ..data.generators import GENERATORS
from ..data.seed import capture_rng, derive_seed, part_ranks, restore_rng, seed_devices, seed_generators

_NOTHING: Final = nullcontext()
_OF_HOOKS: Final = 0x686F6F6B
"""Keeps the seeds of the common stream apart from those of epochs and ranks."""
_LARGEST: Final = 2**63 - 1


class RankStreams:
    """The random numbers of a rank that reads other samples than the rest.

    Inside ``with streams:``, this rank draws from a stream of its own, for dropout and augmentation. Everywhere else
    all ranks draw the same: hooks that reset layers or add noise, and optimizers that draw. With a single data rank,
    both are the global generators.

    In its steps, data rank 0 draws what one process would draw: its own stream begins in each epoch where the common
    one is then, and at the end of the epoch the common one goes on from it. Until then they would give the same
    numbers, so once the first step has drawn any, the common stream begins again elsewhere. If steps draw nothing,
    hooks draw what they draw in one process. A hook that seeds torch, or sets its state, does so for steps as well.
    """

    __slots__ = (
        "_common", "_data_rank", "_depth", "_devices", "_drew", "_generators", "_has_begun", "_is_apart", "_mark",
        "_own", "_seed", "_start", "is_parted",
    )  # fmt: skip

    def __init__(self) -> None:
        self.is_parted = False
        """Whether there are two streams."""
        self._depth = self._data_rank = 0
        self._seed = self._mark = 0
        """The run's seed, and the initial seed of torch's generator in the common stream, which tells ranks apart."""
        self._devices: Sequence[torch.device] = ()
        self._generators: list[DeviceGenerator] = []
        self._own: Any = None
        self._common: Any = None
        self._start: Any = None
        """Where rank 0's own stream began."""
        self._has_begun, self._drew = True, False
        """Whether rank 0's own stream has begun in this epoch, and whether it had drawn when it was resumed."""
        self._is_apart: bool | None = None
        """Whether rank 0's steps draw; None before the first one."""

    @property
    def is_open(self) -> bool:
        """Whether `settle` is to be called after the next step."""
        return self.is_parted and self._is_apart is None

    # --- the run -----------------------------------------------------------------------------------------------------

    def part(self, strategy: Strategy, seed: int) -> None:
        """Begin the streams: the common one goes on from rank 0's generators. Collective: every rank calls it."""
        seed_devices(strategy.devices, seed, 0)
        if strategy.data_size == 1:
            return
        self._devices, self._generators, self._seed = strategy.devices, device_generators(strategy.devices), seed
        self._data_rank, self._is_apart = strategy.data_rank, None
        self._meet(strategy)
        self._common, self._own, self._start = self._state(), self._state(), self._state()
        self.is_parted, self._has_begun = True, True
        with self:
            part_ranks(self._devices, seed, self._data_rank)
        self._has_begun = self._data_rank > 0

    def begin_epoch(self, strategy: Strategy, *, is_new: bool) -> None:
        """Take rank 0's stream, in which a hook may have drawn on some ranks only. Collective."""
        if not self.is_parted:
            return
        self._look()
        draws = self._has_drawn()
        if is_new and draws:
            self._put(self._own)
        draws = self._meet(strategy, draws)
        if is_new:
            self._has_begun, self._drew = self._data_rank > 0, False
            self._is_apart = draws or (None if self._is_apart is None else False)

    def begin_steps(self, epoch: int) -> None:
        """Begin the common stream elsewhere, after the hooks at the start of an epoch, if steps draw."""
        if self.is_parted and self._is_apart:
            with self:  # rank 0's own stream begins here
                pass
            self.restart(epoch, 3)

    def settle(self, strategy: Strategy, step: int) -> None:
        """Find out in the first step whether steps draw. Collective: every rank calls it."""
        self._is_apart = strategy.ranks.all.broadcast(self._has_drawn())
        if self._is_apart:
            self.restart(step, 2)

    def restart(self, *place: int) -> None:
        """Begin the common stream again for a place in the run, as after hooks that ran less often on some ranks."""
        if self.is_parted:
            self._look()
            seed = derive_seed(self._seed, _OF_HOOKS, *place)
            seed_generators(seed)
            seed_devices(self._devices, seed, 0)
            self._set_mark(self._seed)

    def _meet(self, strategy: Strategy, draws: bool = False) -> bool:
        draws, state = strategy.ranks.all.broadcast((draws, capture_rng(strategy.devices)))
        restore_rng(state, strategy.devices)
        self._set_mark(torch.initial_seed())
        return draws

    def _set_mark(self, of_first: int) -> None:
        """Change the initial seed in the state of torch's generator, on which nothing that it draws depends.

        It differs between ranks so that a rank can see that its generator was set to the state of another's.
        """
        self._mark = (
            of_first if self._data_rank == 0 else derive_seed(self._seed, _OF_HOOKS, self._data_rank) & _LARGEST
        )
        state = torch.get_rng_state()
        state[:8].view(torch.int64)[0] = self._mark if self._mark <= _LARGEST else self._mark - 2**64
        torch.set_rng_state(state)
        if self.is_parted:
            self._take(self._common)

    def _has_drawn(self) -> bool:
        """Return whether rank 0 has drawn from its own stream since it began; elsewhere False."""
        if self._data_rank or not self._has_begun:
            return False
        return (
            self._drew
            or GENERATORS.differ(self._own[0], self._start[0])
            or any(not torch.equal(*pair) for pair in zip(self._own[1], self._start[1], strict=True))
        )

    # --- micro-batches -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self.is_parted:
            if not self._depth:
                self._go_in()
            self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        if self._depth:
            self._depth -= 1
            if not self._depth:
                self._go_out()

    def _go_in(self) -> None:
        self._look()
        self._take(self._common)
        if self._has_begun:
            self._put(self._own)
        else:
            self._take(self._start)
            self._has_begun = True

    def _go_out(self) -> None:
        self._take(self._own)
        self._put(self._common)

    def _look(self) -> None:
        """Let this rank's own stream go on from what a hook has set, if it has."""
        if torch.default_generator.initial_seed() == self._mark:
            return
        now = self._state()
        GENERATORS.follow(self._own[0], now[0], self._common[0])
        for index, (state, before) in enumerate(zip(now[1], self._common[1], strict=True)):
            if not torch.equal(state, before):
                self._own[1][index] = state
        self._set_mark(torch.initial_seed())

    def common(self) -> AbstractContextManager[None]:
        """Return the context of a hook or an update inside a micro-batch, in manual optimization."""
        return self._left() if self._depth else _NOTHING

    @contextmanager
    def _left(self) -> Iterator[None]:
        depth, self._depth = self._depth, 0
        self._go_out()
        try:
            yield
        finally:
            self._go_in()
            self._depth = depth

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore this rank's own stream on exit."""
        if not self.is_parted:
            yield
            return
        has_begun = self._has_begun
        with self:
            before = RandomStreams(self._devices)
        try:
            yield
        finally:
            with self:
                before.rewind()
            self._has_begun = has_begun

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self, devices: Sequence[torch.device]) -> dict[str, object]:
        """Return the states of the generators: this rank's own, and under ``hooks`` the common ones."""
        common = capture_rng(devices)
        if not self.is_parted:
            return common
        has_begun = self._has_begun
        with self:
            own = capture_rng(devices)
        self._has_begun = has_begun
        known = {"has_begun": has_begun, "has_drawn": self._has_drawn(), "is_apart": self._is_apart}
        return {**own, "hooks": {**common, **known}}

    def load_state_dict(self, state: dict[str, Any], devices: Sequence[torch.device]) -> None:
        """Restore what `state_dict` returned in this process."""
        with self:
            restore_rng(state, devices)
        if self.is_parted:
            self.load_common(state["hooks"])

    def load_common(self, state: Mapping[str, Any]) -> None:
        """Restore the common stream, once this rank's own is restored."""
        self._put(self._own)
        self._take(self._start)
        restore_rng(state, self._devices)
        self._set_mark(torch.initial_seed())
        self._is_apart, self._drew = state.get("is_apart"), state.get("has_drawn", False)
        self._has_begun = state.get("has_begun", True) or self._data_rank > 0

    def _state(self) -> tuple[Any, list[Tensor]]:
        return GENERATORS.new_state(), [generator.get_state() for generator in self._generators]

    def _take(self, state: tuple[Any, list[Tensor]]) -> None:
        GENERATORS.take(state[0])
        for index, generator in enumerate(self._generators):  # their states are on the host, so nothing waits
            state[1][index] = generator.get_state()

    def _put(self, state: tuple[Any, list[Tensor]]) -> None:
        GENERATORS.put(state[0])
        for generator, saved in zip(self._generators, state[1], strict=True):
            generator.set_state(saved)
