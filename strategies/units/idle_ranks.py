"""IdleRanks: ranks without samples take part in what the others' step sends, without running the module."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ...common.errors import ModuleError
from ..distributed.call_watch import CallWatch
from ..distributed.collectives import Collectives
from ..distributed.debug import user_call
from ..torch_internals.autograd import is_in_backward
from ..torch_internals.sharded_units import (
    end_backward,
    forget_order,
    join_gather,
    join_reduce,
    lend_shards,
    list_unit_groups,
)
from .unit_order import UnitOrder

if TYPE_CHECKING:
    from ..torch_internals.sharded_units import FSDPParamGroup


class IdleRanks:
    """Lets data ranks that have no samples in a step follow those that have some.

    In such a step, the first rank with samples tells the idle ones, by a small message before it sends anything for a
    unit, which unit is gathered or reduced next; they take part with their shards and with gradients of zero. If the
    user's code sends something itself, no other rank can know what: the idle ranks then run the step as well, on a
    batch of the first rank. While they catch up, the others lend them their shards.

    Args:
        roots: the ``fully_shard`` roots of the module.
        order: in which ranks with samples gather and reduce.
        collectives: over the data ranks, between ranks that hold the same parts of the module.
        can_run_step: whether idle ranks can run a step that the others have begun.
        run_by_all: the steps that all ranks run in any case, with samples or without.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        order: UnitOrder,
        collectives: Collectives,
        *,
        can_run_step: bool,
        run_by_all: Collection[str],
    ) -> None:
        self.order, self.collectives, self.can_run_step = order, collectives, can_run_step
        self._roots = list(roots)
        self._run_by_all = set(run_by_all)
        """The steps that all ranks run; those whose code sends something itself are added."""
        self._watched: _Watching | None = None
        """The step of this rank whose collectives are watched."""

    @property
    def has_idle(self) -> bool:
        """Whether other ranks have no samples in the step of this rank that runs now."""
        return self._watched is not None

    @contextmanager
    def beside(self, step_name: str, busy: Sequence[bool], lent: object) -> Iterator[None]:
        """Run a step of this rank while others are idle. Collective: with `follow` on the idle ranks.

        Args:
            step_name: the kind of step.
            busy: which data ranks have samples.
            lent: what the idle ranks get if they must run the step, too.

        Raises:
            ModuleError: if the step sends something itself, where the idle ranks cannot run it.
        """
        leading = _Leading(self, step_name, busy, lent)
        if step_name in self._run_by_all:
            leading.tell("run", lent)
            yield
            return
        with leading.watching():
            yield
        if leading.found is None:
            leading.tell("end")
            forget_order(leading.groups)
            return
        self._run_by_all.add(step_name)
        if leading.is_first:
            warnings.warn(
                f"{step_name} calls {leading.found}. Where some ranks have no samples, they therefore run the step as "
                "well, on another rank's batch. What it leaves in the module (metrics, lists, buffers, random numbers) "
                "is undone, but not what it writes elsewhere, such as files: drop the incomplete batches of an epoch, "
                "or send in a hook after the step.",
                stacklevel=2,
            )

    def follow(
        self, step_name: str, busy: Sequence[bool], run: Callable[[object], None], join: Callable[..., None]
    ) -> None:
        """Take part in a step of the busy ranks. Collective: with `beside` on these.

        Args:
            step_name: the kind of step.
            busy: which data ranks have samples.
            run: runs the step with what the first of them lends.
            join: takes part in what the busy ranks do `together`, and gets the same arguments.
        """
        groups, has_reduced = list_unit_groups(self._roots), False
        while True:
            kind, *content = self.collectives.recv(list(busy).index(True))
            if kind == "gather":
                index, from_part, in_forward = content
                join_gather(groups[index], from_part=from_part, in_forward=in_forward)
            elif kind == "reduce":
                index, has_gradient = content
                join_reduce(groups[index], has_gradient)
                has_reduced = True
            elif kind == "together":
                join(*content)
            elif kind == "run":
                run(content[0])
                return
            elif kind == "catch up":
                self._run_by_all.add(step_name)
                _CatchingUp(self, step_name, busy).run(partial(run, content[0]))
                return
            elif kind == "refuse":
                raise _idle_ranks_error(step_name, *content)
            else:
                break
        if has_reduced:
            end_backward(self._roots)
        forget_order(groups)

    @contextmanager
    def note(self, step: _Watching) -> Iterator[None]:
        """Note that a step of this rank, which runs inside, is watched."""
        self._watched = step
        try:
            yield
        finally:
            self._watched = None

    @contextmanager
    def together(self, *what: Any) -> Iterator[None]:
        """Let idle ranks take part in the collectives inside, which are the trainer's, by the `join` of `follow`."""
        if self._watched is None:
            self.order.meet(what[0])
            yield
            return
        with self._watched.watch.paused():
            self.order.meet(what[0])
            self._watched.note_together(*what)
            yield


class _Watching(ABC):
    """A step of this rank in which what it sends is watched.

    Args:
        peers: the ranks of the step.
        step_name: the kind of step.
        busy: which data ranks have samples.
    """

    def __init__(self, peers: IdleRanks, step_name: str, busy: Sequence[bool]) -> None:
        self._peers, self._step_name = peers, step_name
        self._collectives = peers.collectives
        self._busy = [rank for rank, is_busy in enumerate(busy) if is_busy]
        self._idle = [rank for rank, is_busy in enumerate(busy) if not is_busy]
        others = [rank for at, rank in enumerate(self._collectives.ranks) if at != self._collectives.rank]
        self.watch = CallWatch(others, self._find)
        self.order = peers.order
        self.members = self._busy
        """The data ranks that agree on what this one gathers and reduces."""
        self.groups: Sequence[FSDPParamGroup] = ()
        """Those of the units, once the step is watched."""
        self.found: str | None = None
        """The user's call that sends something, once it was seen."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the step, which runs inside."""
        with self._peers.note(self), self.order.among(self.members, self, self.watch), self.watch:
            self.groups = self.order.groups
            yield

    def _find(self) -> None:
        """Meet the other ranks that run the step before the user's code sends something; the idle ones run it, too."""
        call = user_call()
        with self.watch.paused():
            self.order.meet(call)
            if self.found is None:
                self.found = call
                self._let_all_run()
                self.order.join_all()

    @abstractmethod
    def _let_all_run(self) -> None:
        """Let all ranks come to the user's first call that sends something."""

    def note_gather(self, index: int, *, from_part: bool, in_forward: bool) -> None:
        """Note a gather of a unit."""
        if self.found is None:
            self._note_gather(index, from_part, in_forward)

    def note_reduce(self, index: int, has_gradient: Sequence[bool]) -> None:
        """Note a reduction of a unit's gradients."""
        if self.found is None:
            self._note_reduce(index, list(has_gradient))

    @abstractmethod
    def note_together(self, *what: object) -> None:
        """Note what the trainer sends by itself."""

    @abstractmethod
    def _note_gather(self, index: int, from_part: bool, in_forward: bool) -> None: ...

    @abstractmethod
    def _note_reduce(self, index: int, has_gradient: list[bool]) -> None: ...


class _Leading(_Watching):
    """The step of a rank with samples; the first of these tells the idle ranks what comes next."""

    def __init__(self, peers: IdleRanks, step_name: str, busy: Sequence[bool], lent: object) -> None:
        super().__init__(peers, step_name, busy)
        self._lent = lent
        self.is_first = self._collectives.rank == self._busy[0]

    def tell(self, *message: object) -> None:
        """Send a message to the idle ranks, if this is the first rank with samples."""
        if self.is_first:
            _send_all(self._collectives, self._idle, message)

    def note_together(self, *what: object) -> None:
        if self.found is None:
            self.tell("together", *what)

    def _note_gather(self, index: int, from_part: bool, in_forward: bool) -> None:
        self.tell("gather", index, from_part, in_forward)

    def _note_reduce(self, index: int, has_gradient: list[bool]) -> None:
        self.tell("reduce", index, has_gradient)

    def _let_all_run(self) -> None:
        if not self._peers.can_run_step or is_in_backward():
            self.tell("refuse", self.found, self._idle)
            raise _idle_ranks_error(self._step_name, self.found, self._idle)
        self.tell("catch up", self._lent)
        while (index := self._collectives.recv(self._idle[0])) is not None:
            lend_shards(self.groups[index])


class _CatchingUp(_Watching):
    """The step of an idle rank, until it sends what the others are about to send; they lend it their shards."""

    def __init__(self, peers: IdleRanks, step_name: str, busy: Sequence[bool]) -> None:
        super().__init__(peers, step_name, busy)
        self._is_first = self._collectives.rank == self._idle[0]
        self.members = [self._collectives.rank]

    def run(self, step: Callable[[], None]) -> None:
        """Run the step.

        Raises:
            ModuleError: if it ends without sending anything itself.
        """
        with self.watching():
            step()
        if self.found is None:
            raise self._refusal()

    def _tell(self, message: object) -> None:
        if self._is_first:
            _send_all(self._collectives, self._busy, message)

    def note_together(self, *what: object) -> None:
        if self.found is None:
            raise self._refusal()

    def _note_gather(self, index: int, from_part: bool, in_forward: bool) -> None:
        self._tell(index)

    def _note_reduce(self, index: int, has_gradient: list[bool]) -> None:
        raise self._refusal()

    def _let_all_run(self) -> None:
        self._tell(None)

    def _refusal(self) -> ModuleError:
        return ModuleError(
            f"{self._step_name} sends something itself on data ranks {self._busy}, but not on rank "
            f"{self._collectives.rank}, with the same batch; let all ranks send the same."
        )


def _idle_ranks_error(step_name: str, found: str | None, idle: Sequence[int]) -> ModuleError:
    return ModuleError(
        f"{step_name} calls {found}, while data ranks {idle} have no samples in this step and cannot take part in it. "
        "Drop the incomplete batches of an epoch (drop_last=True), or send in a hook after the step."
    )


def _send_all(collectives: Collectives, ranks: Sequence[int], message: object) -> None:
    for transfer in [collectives.isend(message, rank) for rank in ranks]:
        transfer.wait()
