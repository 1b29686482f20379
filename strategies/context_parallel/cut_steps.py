"""CutSteps: a module's steps on parts of sequences; the first, and some later ones, are compared with whole ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

from torch import nn
from torch.utils.checkpoint import CheckpointError as RecomputationError
from torch.utils.hooks import RemovableHandle

from ..distributed.collectives import Collectives
from ..targets.shares import note_share
from .check import check_step, loss_in
from .context import ContextParallel
from .counted import not_counted
from .part_logs import PartLogs
from .positions import give_positions

_CUT: Final = frozenset(("training_step", "validation_step", "test_step"))
"""The steps that get a part of each sequence; prediction uses whole sequences."""


@dataclass(frozen=True, slots=True)
class _Checked:
    """What sequences have shown of a kind of step."""

    longest: int = 0
    """The length of the longest sequence; 0 for none that was cut."""
    are_uneven: bool = False
    """Whether parts had different lengths."""

    def shows_more_than(self, other: _Checked) -> bool:
        """Return whether these sequences show what the others have not."""
        return self != other and self.and_also(other) != other

    def and_also(self, other: _Checked) -> _Checked:
        """Return what both have shown."""
        return _Checked(max(self.longest, other.longest), self.are_uneven or other.are_uneven)


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
        self._logs = PartLogs(context.merge)
        self._checked: dict[str, _Checked] = {}
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
        steps: Sequence[Sequence[object]],
        run: Callable[..., object],
        *,
        has_idle: bool = False,
    ) -> None:
        """Compare the first step of each kind, and some later ones, with one on whole sequences. Collective.

        What a module computes may change with the length: a window shows once sequences are longer, and a mean over
        tokens once parts differ in length.

        Args:
            step_name: the kind of step.
            module: the user's module.
            steps: the arguments of the steps that run now; the first of each is the whole batch. The very first is
                compared, and those that show more than the ones before. Other ranks may have other numbers of them.
            run: calls the step with such arguments and returns its output, or None on a rank where it does not end.
            has_idle: whether ranks without samples cannot take part in another check now.

        Raises:
            DataError: on all ranks, for sequences that cannot be cut.
            ModuleError: on all ranks, if the results from parts differ.
        """
        if step_name not in _CUT or self.collectives.is_fake:
            return
        found = [self._shown_by(args[0], module) for args in steps]
        if step_name not in self._checked:
            self._checked[step_name] = found[0]
            self._compare(module, steps[0], run)
        if has_idle:
            return
        while True:
            checked = self._checked[step_name]
            new = [index for index, shown in enumerate(found) if shown.shows_more_than(checked)]
            is_new = bool(new)
            if self._peers.world_size > 1:
                is_new = bool(self._peers.begin_all_reduce([float(is_new)], "max")()[0])
            if not is_new:
                return
            # of this rank's first batch, where only another rank has one that shows more
            index = max(new, key=lambda place: found[place].longest, default=0)
            self._checked[step_name] = checked.and_also(found[index])
            self._compare(module, steps[index], run)

    def _compare(self, module: nn.Module, args: Sequence[object], run: Callable[..., object]) -> None:
        check_step(self.context, module, args, run, self.collectives, self._logs.weighted_by_tokens)

    def _shown_by(self, batch: object, module: nn.Module) -> _Checked:
        lengths = self.context.lengths(batch, module)
        if self.context.is_short(lengths):
            return _Checked()
        return _Checked(max(lengths), any(length % self.context.size for length in lengths))

    def annotate(self, error: BaseException) -> None:
        """Add a note to errors of torch that say nothing of sequences."""
        if isinstance(error, RecomputationError):
            error.add_note(
                "Attention under context parallelism can be recomputed only by Trainer(activation_checkpointing=...); "
                "do not use torch.utils.checkpoint or a model's gradient_checkpointing_enable()."
            )

    def alone(self) -> AbstractContextManager[None]:
        """Return the context of steps in which this rank logs without the others; see `PartLogs.alone`."""
        return self._logs.alone()

    def skip_check(self, step_name: str) -> None:
        """Do without the first check of a kind of step, which other ranks have made."""
        self._checked.setdefault(step_name, _Checked())

    def run(self, step_name: str, module: nn.Module, args: Sequence[object], run: Callable[..., object]) -> object:
        """Call ``run(step_name, *args)``, with this rank's part of the batch, the first of `args`, if steps are cut.

        Where a sequence is too short for all ranks, each computes the whole, and one of them counts.
        """
        if step_name not in _CUT:
            return run(step_name, *args)
        batch, *rest = args
        lengths = self.context.lengths(batch, module)
        share = self.context.share(lengths)
        if self.context.is_short(lengths):
            assert share is not None
            self.context.begin(lengths)
            counted = nullcontext() if share else not_counted(module)
            with counted, self._logs.of_whole(module, share):
                output = run(step_name, *args)
        else:
            part = self.context.cut(batch, module)
            with self.context.attention(), self._logs.of_part(module, share):
                output = run(step_name, part, *rest)
        loss = loss_in(output)
        if share != 1.0 and loss is not None:
            note_share(loss, share)
        return output
