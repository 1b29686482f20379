"""UnitOrder: all ranks gather the same units and reduce the same gradients, in one order, whatever each one uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from torch import nn

from ...common.errors import ModuleError
from ..distributed.call_watch import CallWatch
from ..distributed.collectives import Collectives
from ..distributed.debug import user_call
from ..distributed.noticeboard import Noticeboard
from ..torch_internals.autograd import leave_transformations
from ..torch_internals.modules import find_compiled_call
from ..torch_internals.sharded_units import (
    call_instead,
    end_backward,
    gathers_next,
    is_in_forward,
    is_kept_in_part,
    join_reduce,
    lend_to_gather,
    lend_to_reduce,
    list_gradients_to_reduce,
    list_shards,
    list_trained,
    list_unit_groups,
)

if TYPE_CHECKING:
    from ..torch_internals.sharded_units import FSDPParamGroup

_TRIALS: Final = 32
"""The runs in which ranks agree on every unit, for a step that leaves some parameters out."""
_PATIENCE: Final = 60.0  # seconds in which all ranks leave the order of earlier runs, if it changes for all of them,
_SHARE: Final = 0.5  # and the share of the timeout of a collective, in which the others may already wait


class UnitCall(NamedTuple):
    """What a rank does next in a step, for which it needs the other ranks."""

    kind: str
    """``"gather"`` or ``"reduce"`` a unit; ``"meet"`` where the ranks send something else; or ``"end"``."""
    unit: int = 0
    """The index of the unit."""
    detail: Any = None
    """In a gather, whether it is from a part, and for a forward; in a reduction, which parameters have gradients."""

    @property
    def urgency(self) -> tuple[int, int]:
        """What comes first if ranks differ: forward in the order of units, then backward in the other direction."""
        if self.kind == "gather" and self.detail[1]:
            return 0, self.unit
        return 1, -self.unit


class Listener(Protocol):
    """Is told what ranks gather and reduce, before they do."""

    def note_gather(self, index: int, *, from_part: bool, in_forward: bool) -> None:
        """Note a gather of a unit."""

    def note_reduce(self, index: int, has_gradient: Sequence[bool]) -> None:
        """Note a reduction of a unit's gradients."""


@dataclass
class _Habit:
    """What the runs of one kind of step have done so far."""

    calls: list[UnitCall] | None = None
    """The calls of every run; None while the ranks agree on each one."""
    num_even: int = 0
    """The last runs in which all ranks have made the same calls."""
    is_uneven: bool = False
    """Whether ranks have made different calls in a run."""


@dataclass
class _Run:
    """One run of a step on this rank."""

    step: str
    habit: _Habit
    calls: list[UnitCall] = field(default_factory=list)
    """What this rank has done."""
    agrees: bool = True
    """Whether ranks agree on each call; otherwise they follow those of earlier runs."""
    is_even: bool = True
    has_lent: bool = False
    """Whether this rank has taken part in a reduction that it did not need."""


class UnitOrder:
    """Makes ranks agree on the next unit to gather or to reduce where their steps may differ.

    torch's units gather when they are called, and reduce the gradients that they have. Where ranks call different units
    (experts, heads, early exits), or use different parameters of one, the collectives would be of different units. So
    in a run in which the ranks agree, each says what it needs next, all take part in what is most urgent, and those
    that do not need it lend their shards, and zeros for gradients.

    They agree in the first run of each kind of step; in the first 32, if it leaves parameters out; and in all, if ranks
    have differed in one. Otherwise, each rank compares its calls with those of the last run, and sends nothing. If
    all leave that order at the same place, they agree again.

    Args:
        roots: the ``fully_shard`` roots of the module.
        name_of: returns the name of a shard.
        collectives: over the data ranks.
        always: whether ranks agree in all runs.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        name_of: Callable[[nn.Parameter], str],
        collectives: Collectives,
        *,
        always: bool,
    ) -> None:
        self._roots, self._name_of, self._collectives, self._always = roots, name_of, collectives, always
        self._is_alone = collectives.world_size == 1 or collectives.is_fake
        self._habits: dict[tuple[object, ...], _Habit] = {}
        self._run: _Run | None = None
        self._listener: Listener | None = None
        self._members: Sequence[int] = range(collectives.world_size)
        """The data ranks that run the step."""
        self._num_meetings = 0
        self._board: Noticeboard | None = None
        others = [rank for at, rank in enumerate(collectives.ranks) if at != collectives.rank]
        self._watch = CallWatch(others, self._meet_at_call)

    @cached_property
    def groups(self) -> Sequence[FSDPParamGroup]:
        """Those of the units, once the module has been sharded as a whole."""
        groups = list_unit_groups(self._roots)
        call_instead(groups, self._unshard, self._post_backward)
        return groups

    # --- runs --------------------------------------------------------------------------------------------------------

    def begin(self, step: str, *kind: object) -> bool:
        """Begin a run of a step, of a kind; return False if one has begun already, of which this one is a part."""
        if self._is_alone or self._run is not None:
            return False
        assert self.groups is not None
        habit = self._habits.setdefault((step, *kind), _Habit(is_uneven=self._always))
        self._run = _Run(step, _Habit(is_uneven=True) if self._listener else habit)
        self._run.agrees = self._run.habit.calls is None
        return True

    def end(self) -> None:
        """End the run, if one has begun. Collective."""
        run = self._run
        if run is None:
            return
        try:
            if run.agrees or len(run.calls) < len(run.habit.calls or ()) - 1:
                self._do(UnitCall("end", detail=self._calls_all(run)))
        finally:
            self._run = None
        if run.has_lent:
            end_backward(self._roots)
        if run.agrees:
            self._learn(run)

    def forget(self) -> None:
        """End the run after an error."""
        self._run = None

    def _calls_all(self, run: _Run) -> bool:
        """Return whether a run has used all units, and all parameters, if it has reduced gradients."""
        gathered = {call.unit for call in run.calls if call.kind == "gather"}
        used = {call.unit: call.detail for call in run.calls if call.kind == "reduce"}
        for index, group in enumerate(self.groups):
            trained = list_trained(group)
            if index not in gathered | used.keys():
                return False
            if used and any(trained) and used.get(index) != trained:
                return False
        return True

    def _learn(self, run: _Run) -> None:
        habit = run.habit
        if not run.is_even:
            habit.is_uneven, habit.calls = True, None
            return
        habit.num_even += 1
        uses_all = run.calls[-1].detail
        if not habit.is_uneven and (uses_all or habit.num_even >= _TRIALS):
            habit.calls = run.calls

    @contextmanager
    def among(self, members: Sequence[int], listener: Listener, watch: CallWatch) -> Iterator[None]:
        """Run a step inside in which only some data ranks take part; the listener tells the others."""
        before = self._members, self._watch
        self._members, self._listener, self._watch = members, listener, watch
        assert self.groups is not None
        try:
            yield
        finally:
            self._members, self._watch = before
            self._listener = None

    def join_all(self) -> None:
        """Let all data ranks take part in the rest of this run. Collective."""
        self._members, self._listener = range(self._collectives.world_size), None

    def watching(self) -> AbstractContextManager[object]:
        """Return a context for user code, in which ranks meet before what it sends itself."""
        run = self._run
        watches = run is not None and run.agrees and self._listener is None and not self._is_compiled
        return self._watch if watches else nullcontext()

    @cached_property
    def _is_compiled(self) -> bool:
        """Whether modules are compiled, which would run uncompiled while they are watched."""
        modules = [module for root in self._roots for module in root.modules()]
        return any(find_compiled_call(module) is not None for module in modules)

    # --- calls -------------------------------------------------------------------------------------------------------

    def meet(self, where: str) -> None:
        """Let all ranks come to the same place of a run, where they send something else. Collective in a run."""
        if self._run is not None:
            self._do(UnitCall("meet", detail=where))

    def _meet_at_call(self) -> None:
        with self._watch.paused():
            self.meet(user_call())

    def _unshard(self, index: int, group: FSDPParamGroup, async_op: bool) -> None:
        if not group.is_unsharded and gathers_next(group):
            detail = is_kept_in_part(group), is_in_forward(group)
            if self._run is not None:
                self._do(UnitCall("gather", index, detail))
            elif self._listener is not None:
                with self._watch.paused():
                    self._listener.note_gather(index, from_part=detail[0], in_forward=detail[1])
        with self._watch.paused():
            type(group).unshard(group, async_op)

    def _post_backward(self, index: int, group: FSDPParamGroup) -> None:
        has_gradient = list_gradients_to_reduce(group)
        if any(has_gradient):
            if self._run is not None:
                has_gradient = self._do(UnitCall("reduce", index, has_gradient))
            elif self._listener is not None:
                with self._watch.paused():
                    self._listener.note_reduce(index, has_gradient)
            with self._watch.paused():
                join_reduce(group, has_gradient)
        else:
            with self._watch.paused():
                type(group).post_backward(group)

    def _do(self, call: UnitCall) -> Any:
        """Wait until it is this call's turn, and take part in those before; return its detail, as agreed."""
        run = self._run
        assert run is not None
        run.calls.append(call)
        if not run.agrees:
            position, expected = len(run.calls) - 1, run.habit.calls
            assert expected is not None
            if position < len(expected) and expected[position] == call:
                return call.detail
            self._leave_order(run, call, expected[position] if position < len(expected) else None)
        with self._watch.paused(), leave_transformations():
            return self._agree(run, call)

    def _agree(self, run: _Run, own: UnitCall) -> object:
        while True:
            calls = self._exchange(own)
            run.is_even &= all(call == calls[0] for call in calls)
            pending = [call for call in calls if call.kind in ("gather", "reduce")]
            if not pending:
                self._check_place(run, calls)
                return own.detail
            first = min(pending, key=lambda call: call.urgency)
            same = [call.detail for call in pending if call[:2] == first[:2]]
            detail: object
            if first.kind == "reduce":
                detail = [any(has) for has in zip(*same, strict=True)]
            else:
                detail = (same[0][0], any(in_forward for _, in_forward in same))
            self._tell(first, detail)
            if own[:2] == first[:2] and (own.kind == "reduce" or own.detail[0] == detail[0]):
                return detail
            self._lend(run, first, detail)

    def _exchange(self, own: UnitCall) -> list[UnitCall]:
        """Return the next call of each rank that runs the step."""
        collectives, members = self._collectives, self._members
        if len(members) == collectives.world_size:
            return [UnitCall(*call) for call in collectives.exchange(tuple(own))]
        if len(members) == 1:
            return [own]
        first, others = members[0], members[1:]
        if collectives.rank != first:
            collectives.send(tuple(own), first)
            return [UnitCall(*call) for call in collectives.recv(first)]
        calls = [own, *(UnitCall(*collectives.recv(rank)) for rank in others)]
        for transfer in [collectives.isend([tuple(call) for call in calls], rank) for rank in others]:
            transfer.wait()
        return calls

    def _tell(self, call: UnitCall, detail: Any) -> None:
        if self._listener is not None and call.kind == "gather":
            self._listener.note_gather(call.unit, from_part=detail[0], in_forward=detail[1])
        elif self._listener is not None:
            self._listener.note_reduce(call.unit, detail)

    def _lend(self, run: _Run, call: UnitCall, detail: Any) -> None:
        group = self.groups[call.unit]
        if call.kind == "gather":
            lend_to_gather(group, from_part=detail[0], in_forward=detail[1])
        else:
            lend_to_reduce(group, detail)
            run.has_lent = True

    def _check_place(self, run: _Run, calls: Sequence[UnitCall]) -> None:
        """Check that all ranks end a run, or meet.

        Raises:
            ModuleError: if some end and others still send.
        """
        if len({call.kind for call in calls}) == 1:
            return
        at = [f"data rank {rank} {self._words(call)}" for rank, call in zip(self._members, calls, strict=True)]
        raise ModuleError(
            f"{run.step} sends something itself on some ranks only: {'; '.join(at[:8])}. Let all ranks send the same."
        )

    # --- another order than before -----------------------------------------------------------------------------------

    def _leave_order(self, run: _Run, call: UnitCall, expected: UnitCall | None) -> None:
        """Leave the order of earlier runs together with all other ranks. Collective.

        Raises:
            ModuleError: if other ranks follow it.
        """
        collectives, board, group = self._collectives, self._board, self._collectives.process_group
        assert group is not None
        if board is None:
            board = self._board = Noticeboard(group.store, "order of units")
        self._num_meetings += 1
        keys = [f"{self._num_meetings}/{rank}" for rank in range(collectives.world_size)]
        board.post(keys[collectives.rank])
        came = board.wait_for(keys, min(_PATIENCE, _SHARE * group.timeout.total_seconds()))
        if len(came) < len(keys):
            missing = [rank for rank, key in enumerate(keys) if key not in came]
            raise ModuleError(
                f"{run.step} {self._words(call)} on data rank {collectives.rank}, where it {self._words(expected)} in "
                f"earlier runs, and still does on data ranks {missing[:8]}: ranks use different parameters. Set "
                "find_unused_parameters=True of the strategy, so that they agree on each unit."
            )
        board.remove_once_read(len(keys), *keys)
        run.agrees, run.habit.calls, run.habit.num_even = True, None, 0

    def _words(self, call: UnitCall | None) -> str:
        if call is None or call.kind == "end":
            return "ends"
        if call.kind == "meet":
            return f"calls {call.detail}"
        names = [self._name_of(shard) for shard in list_shards(self.groups[call.unit])]
        if call.kind == "gather":
            return f"gathers {', '.join(names[:3])}"
        used = [name for name, has in zip(names, call.detail, strict=True) if has]
        return f"reduces the gradients of {', '.join(used[:3])}"
