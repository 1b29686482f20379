"""CutSteps: the steps of a module on parts of sequences, the first of each kind compared with whole ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import nn

from ..distributed.collectives import Collectives
from .check import check_step
from .context import ContextParallel

_CUT: Final = frozenset(("training_step", "validation_step", "test_step"))
"""The steps that get a part of each sequence; predictions are of whole ones."""


class CutSteps:
    """Runs the steps of a rank on its parts of the sequences of their batches.

    Args:
        context: cuts the batches.
        collectives: over the ranks that compute one step together, each a part of its sequences or a stage of it.
    """

    def __init__(self, context: ContextParallel, collectives: Collectives) -> None:
        self.context = context
        self._collectives = collectives
        self._checked: set[str] = set()

    def begin(self) -> None:
        """Check all steps again: they will be those of another module, or of another run."""
        self._checked.clear()

    def check(self, step_name: str, module: nn.Module, args: Sequence[Any], run: Callable[..., Any]) -> None:
        """Compare the first step of each kind with that of whole sequences. Collective.

        Args:
            step_name: the kind.
            module: the user's.
            args: of the step, the batch first, whole.
            run: calls the step with such arguments, and returns what it returns: None on a rank that has not its end.

        Raises:
            ModuleError: on all ranks, if parts give something else.
        """
        if step_name in _CUT and step_name not in self._checked and not self._collectives.is_rehearsed:
            self._checked.add(step_name)
            check_step(self.context, module, args, run, self._collectives)

    def run(self, step_name: str, module: nn.Module, args: Sequence[Any], run: Callable[..., Any]) -> Any:
        """Call ``run(step_name, *args)`` with this rank's part of the batch, the first of `args`, where it is cut."""
        if step_name not in _CUT:
            return run(step_name, *args)
        batch, *rest = args
        part = self.context.cut(batch, module)
        with self.context.attention():
            return run(step_name, part, *rest)
