"""CutSteps: a module's steps on parts of sequences; the first, and each longer one, is compared with a whole one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from torch import nn
from torch.utils.checkpoint import CheckpointError as RecomputationError
from torch.utils.hooks import RemovableHandle

from ..distributed.collectives import Collectives
from .check import check_step
from .context import ContextParallel
from .positions import give_positions

_CUT: Final = frozenset(("training_step", "validation_step", "test_step"))
"""The steps that get a part of each sequence; prediction uses whole sequences."""


class CutSteps:
    """Runs a rank's steps on its part of the sequences in their batches.

    Args:
        context: cuts the batches.
        collectives: over the ranks that compute a step together, each for a part of its sequences or a pipeline stage.
        peers: over the ranks without whose shards they cannot run a step, and whose sequences have other lengths.
    """

    def __init__(self, context: ContextParallel, collectives: Collectives, peers: Collectives) -> None:
        self.context, self.collectives = context, collectives
        self._peers = peers
        self._checked: dict[str, int] = {}
        """The kinds of steps that were checked, and for the longest sequence."""
        self._hooks: list[RemovableHandle] = []

    def begin(self, module: nn.Module) -> None:
        """Forget which steps were checked, for another module or another run."""
        self._checked.clear()
        for hook in self._hooks:  # each run begins, also with the same module
            hook.remove()
        self._hooks = give_positions(module, self.context)

    def check(
        self,
        step_name: str,
        module: nn.Module,
        steps: Sequence[Sequence[Any]],
        run: Callable[..., Any],
        *,
        has_idle: bool = False,
    ) -> None:
        """Compare the first step of each kind, and each with longer sequences, with one on whole sequences. Collective.

        What a module computes may change with the length: a window shows once sequences are longer.

        Args:
            step_name: the kind of step.
            module: the user's module.
            steps: the arguments of the steps that run now; the first of each is the whole batch. One of the longest is
                compared, and the very first. Other ranks may have other numbers of them.
            run: calls the step with such arguments and returns its output, or None on a rank where it does not end.
            has_idle: whether ranks without samples cannot take part in another check now.

        Raises:
            DataError: on all ranks, for sequences that cannot be cut.
            ModuleError: on all ranks, if the results from parts differ.
        """
        if step_name not in _CUT or self.collectives.is_rehearsed:
            return
        lengths = [max(self.context.lengths(args[0], module)) for args in steps]
        if step_name not in self._checked:
            self._checked[step_name] = lengths[0]
            check_step(self.context, module, steps[0], run, self.collectives)
        if has_idle:
            return
        length, longest = max(lengths), self._checked[step_name]
        is_longer = length > longest
        if self._peers.world_size > 1:
            is_longer = bool(self._peers.begin_all_reduce([float(is_longer)], "max")()[0])
        if is_longer:
            self._checked[step_name] = max(length, longest)
            check_step(self.context, module, steps[lengths.index(length)], run, self.collectives)

    def annotate(self, error: BaseException) -> None:
        """Add a note to errors of torch that say nothing of sequences."""
        if isinstance(error, RecomputationError):
            error.add_note(
                "Attention under context parallelism can be recomputed only by Trainer(activation_checkpointing=...); "
                "do not use torch.utils.checkpoint or a model's gradient_checkpointing_enable()."
            )

    def skip_check(self, step_name: str) -> None:
        """Do without the first check of a kind of step, which other ranks have made."""
        self._checked.setdefault(step_name, 0)

    def run(self, step_name: str, module: nn.Module, args: Sequence[Any], run: Callable[..., Any]) -> Any:
        """Call ``run(step_name, *args)``, with this rank's part of the batch, the first of `args`, if steps are cut."""
        if step_name not in _CUT:
            return run(step_name, *args)
        batch, *rest = args
        part = self.context.cut(batch, module)
        with self.context.attention():
            return run(step_name, part, *rest)
