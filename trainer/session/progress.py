"""Progress: the state of a run that is not saved, since a resumed run works it out again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal

from ...callbacks.run import Stage
from ...common.storage import AnyPath
from ..data.micro_batch import MicroBatch

LoaderKind = Literal["train", "validate"]


@dataclass(slots=True)
class Progress:
    """The position of a run inside its epoch, beside the counters of `TrainState`, and what hooks have asked for."""

    stage: Stage | None = None
    batch_idx: int = 0
    """The index of the current or last micro-batch."""
    micro_batch: MicroBatch | None = None
    """The current or last training micro-batch."""
    is_in_step: bool = False
    """Whether a training micro-batch has begun whose gradients have not updated the parameters yet."""
    batch_indices: Sequence[int] = ()
    """The sample indices of the current or last evaluation batch; empty if unknown."""
    should_stop: bool = False
    """Whether a hook asked to end training."""
    accumulate_grad_batches: int = 1
    """Micro-batches per step, from the next epoch on."""

    @contextmanager
    def in_stage(self, stage: Stage) -> Iterator[None]:
        """Run the block in a stage. An error leaves the stage as it is: what explains the error asks for it."""
        outer, self.stage = self.stage, stage
        yield
        self.stage = outer

    def go_to(self, batch_idx: int, indices: Sequence[int] = ()) -> None:
        """Make the batch with this index the current one, in an evaluation with the indices of its samples."""
        self.batch_idx, self.batch_indices = batch_idx, indices


@dataclass(slots=True)
class Timetable:
    """When a run logs, validates and may end; the functions of loop/schedule.py write and read it."""

    num_batches: float = 0
    """Micro-batches of the epoch; infinity if only reading can tell."""
    next_log: float = math.inf
    """The next global step at which the loggers get the step's values, until the step after it begins."""
    next_check: float = math.inf
    """The next global step after which to ask whether training is over: the last one, or a meeting of the ranks."""
    validates_inside: bool = False
    """Whether the epoch has validations before its end."""
    validation_interval: float = 1
    """Micro-batches between the validations inside an epoch."""
    next_amount: float = math.inf
    """Samples or tokens after which the next validation is due, where validations count them."""
    validated_at: int = -1
    """The global step of the newest validation."""
    validated_seconds: float = 0.0
    """The training time of the newest validation, or of the start, on the clock that all ranks agree on."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """What predict returns, for each loader; from the end of the epoch on that of all ranks."""

    outputs: list[Any] = field(default_factory=list)
    """The predictions for each batch of each loader."""
    indices: list[list[list[int]]] = field(default_factory=list)
    """Their sample indices, once they are gathered."""


@dataclass(slots=True)
class Saves:
    """The checkpoints of a run, and the time that saving took."""

    last: AnyPath | None = None
    """The newest checkpoint of this run that training can be resumed from, or the one that it was resumed from."""
    seconds: float = 0.0
    """The time for which training has waited for checkpoints and snapshots."""
    is_taking_snapshot: bool = False
    """Whether the state is being taken for a snapshot in memory."""
    _known_folders: set[AnyPath] = field(default_factory=set)

    def note(self, path: AnyPath | None) -> None:
        """Note the newest checkpoint that training can be resumed from."""
        self.last = path

    def is_first_in(self, folder: AnyPath) -> bool:
        """Return whether this run has not asked this for a folder before."""
        is_first = folder not in self._known_folders
        self._known_folders.add(folder)
        return is_first

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting, unless it raises."""
        began = monotonic()
        yield
        self.seconds += monotonic() - began

    @contextmanager
    def taking_snapshot(self) -> Iterator[None]:
        """Tell hooks inside that the state is taken for a snapshot in memory."""
        self.is_taking_snapshot = True
        try:
            yield
        finally:
            self.is_taking_snapshot = False
