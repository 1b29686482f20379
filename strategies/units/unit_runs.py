"""UnitRuns: what ranks do together around the runs of a sharded module's steps, with samples or without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Final

import torch
from torch import nn

from ..distributed.collectives import Collectives
from .idle_ranks import IdleRanks
from .inner_backwards import InnerBackwards
from .inner_calls import gather_for_inner_calls
from .large_layers import LargeLayers
from .parameter_writes import ParameterWrites
from .unit_order import UnitOrder
from .whole_parameters import WholeParameters

_STEPS: Final = (
    *("training_step", "validation_step", "test_step", "predict_step"),
    *("run_synchronized", "forward"),
)


class UnitRuns:
    """Ends runs of steps, and lets ranks without samples take part in those of others.

    Args:
        roots: the ``fully_shard`` roots of the module.
        name_of: returns the name of a shard.
        collectives: over all ranks that share the parameters.
        data_collectives: over the ranks that read different samples and hold the same parts of the module.
        is_manual: whether the module's step computes gradients and updates itself.
        has_stages: whether the module is a part of a pipeline.
        sends: whether the module's forward sends activations to other data ranks, which then run every step.
        always_agrees: whether ranks agree on each unit in every run, see `UnitOrder`.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        name_of: Callable[[nn.Parameter], str],
        collectives: Collectives,
        data_collectives: Collectives,
        *,
        is_manual: bool,
        has_stages: bool,
        sends: bool = False,
        always_agrees: bool,
    ) -> None:
        # a step by hand changes parameters, of which every rank has a part
        by_all = _STEPS if sends else ("training_step",) if is_manual else ()
        gather_for_inner_calls(roots if is_manual else ())
        self.order = UnitOrder(roots, name_of, data_collectives, always=always_agrees)
        """The order in which ranks gather and reduce."""
        self.inner = InnerBackwards(roots)
        """Derivatives that steps compute before their backward."""
        self._idle = IdleRanks(roots, self.order, data_collectives, can_run_step=not has_stages, run_by_all=by_all)
        self._data_collectives, self._has_stages, self._is_manual = data_collectives, has_stages, is_manual
        self._awaited = ""
        """The step whose run ends with its backward, which has not ended yet."""
        self.writes = ParameterWrites(roots, name_of, collectives, evaluates_alone=has_stages)
        """What the steps write into parameters."""
        self.layers: LargeLayers | None = None
        """The large layers of the module, if it has any."""
        self.whole: WholeParameters | None = None
        """The parameters that are not sharded, if the module has any."""

    @contextmanager
    def in_order(self, step_name: str, *, syncs: bool, has_backward: bool = False) -> Iterator[None]:
        """Let all ranks gather and reduce in one order in a run of a step. Collective.

        Args:
            step_name: the kind of step.
            syncs: whether its backward reduces gradients.
            has_backward: whether the run ends with the next `end_backward`.
        """
        has_begun = not self._has_stages and self.order.begin(step_name, torch.is_grad_enabled(), syncs)
        self.inner.begin()
        try:
            with self.order.watching():
                yield
        except BaseException:
            self.order.forget()
            raise
        if has_begun and not has_backward:
            self.order.end()

    def end(self, step_name: str) -> None:
        """End a run of a step, its backward included. Collective after some runs."""
        if self.writes.is_ignoring:
            return  # idle ranks must not wait for an agreement on what this run has written
        with self._idle.together("written"):
            self.writes.end(step_name)

    def await_backward(self, step_name: str) -> None:
        """Note that a run ends with the next `end_backward`, unless it is one of a window of micro-batches."""
        self._awaited = "" if self._has_stages else step_name

    def end_backward(self) -> None:
        """End the run whose backward has ended, if any. Collective after some runs."""
        step_name, self._awaited = self._awaited, ""
        self.inner.end()
        if self._is_manual:
            self.order.meet("backward")  # an update may follow
        elif not self._has_stages:
            self.order.end()
        if self.whole is not None and self.whole.is_due:
            with self._idle.together("whole"):
                self.whole.average()
        if step_name:
            self.end(step_name)

    def agree_on_reads(self, are_read: Sequence[float]) -> list[float]:
        """Return which large layers any rank has read outside of their calls. Collective."""
        with self._idle.together("read", len(are_read)):
            return self._data_collectives.all_reduce(list(are_read), "max")  # type: ignore[no-any-return]

    # --- runs in which some ranks have no samples --------------------------------------------------------------------

    @property
    def has_idle(self) -> bool:
        """Whether other ranks have no samples in the step of this rank that runs now."""
        return self._idle.has_idle

    def beside_idle(self, step_name: str, busy: Sequence[bool], lent: object) -> AbstractContextManager[None]:
        """Return the context of a step of this rank while others `follow`; see `IdleRanks`. Collective."""
        self.writes.keep_whole(step_name)
        return self._idle.beside(step_name, busy, lent)

    def follow(self, step_name: str, busy: Sequence[bool], run: Callable[[object], None]) -> None:
        """Take part in a step of the busy ranks without samples; see `IdleRanks`. Collective."""
        self._idle.follow(step_name, busy, partial(self._run_lent, step_name, run), partial(self._join, step_name))

    def _run_lent(self, step_name: str, run: Callable[[object], None], lent: object) -> None:
        """Run the step as the busy ranks do."""
        self.writes.keep_whole(step_name)
        run(lent)

    def _join(self, step_name: str, what: str, *numbers: int) -> None:
        """Take part in what the busy ranks agree on in a step."""
        if what == "written":
            self.writes.end(step_name, is_absent=True)
        elif what == "whole":
            assert self.whole is not None
            self.whole.average()
        else:
            assert self.layers is not None
            self.layers.note_read(step_name, self._data_collectives.all_reduce([0.0] * numbers[0], "max"))
