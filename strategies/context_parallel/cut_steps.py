"""CutSteps: a module's steps on parts of sequences, of which the first of each kind is compared with a whole one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import nn

from ..distributed.collectives import Collectives
from .check import check_step
from .context import ContextParallel

_CUT: Final = frozenset(("training_step", "validation_step", "test_step"))
"""The steps that get a part of each sequence; prediction uses whole sequences."""


class CutSteps:
    """Runs a rank's steps on its part of the sequences in their batches.

    Args:
        context: cuts the batches.
        collectives: over the ranks that compute a step together, each for a part of its sequences or a pipeline stage.
    """

    def __init__(self, context: ContextParallel, collectives: Collectives) -> None:
        self.context = context
        self._collectives = collectives
        self._checked: set[str] = set()

    def begin(self) -> None:
        """Forget which steps were checked, for another module or another run."""
        self._checked.clear()

    def check(self, step_name: str, module: nn.Module, args: Sequence[Any], run: Callable[..., Any]) -> None:
        """Compare the first step of each kind with one on whole sequences. Collective.

        Args:
            step_name: the kind of step.
            module: the user's module.
            args: the arguments of the step; the first is the whole batch.
            run: calls the step with such arguments and returns its output, or None on a rank where it does not end.

        Raises:
            ModuleError: on all ranks, if the results from parts differ.
        """
        if step_name in _CUT and step_name not in self._checked and not self._collectives.is_rehearsed:
            self._checked.add(step_name)
            check_step(self.context, module, args, run, self._collectives)

    def skip_check(self, step_name: str) -> None:
        """Do without the check of a kind of step, which other ranks have made."""
        self._checked.add(step_name)

    def run(self, step_name: str, module: nn.Module, args: Sequence[Any], run: Callable[..., Any]) -> Any:
        """Call ``run(step_name, *args)``, with this rank's part of the batch, the first of `args`, if steps are cut."""
        if step_name not in _CUT:
            return run(step_name, *args)
        batch, *rest = args
        part = self.context.cut(batch, module)
        with self.context.attention():
            return run(step_name, part, *rest)
