"""Progress: the state of a run that is not saved, since a resumed run works it out again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...callbacks.run import Stage
from ..data.micro_batch import MicroBatch

LoaderKind = Literal["train", "validate"]


@dataclass(slots=True)
class Progress:
    """The position of a run inside its epoch, beside the counters of `TrainState`."""

    stage: Stage | None = None
    batch_idx: int = 0
    """The index of the current or last micro-batch."""
    micro_batch: MicroBatch | None = None
    """The current or last training micro-batch."""
    is_in_step: bool = False
    """Whether a training micro-batch has begun whose gradients have not updated the parameters yet."""
    steps_without_loss: int = 0
    """The steps of this fit in which training_step returned None for each micro-batch."""
    first_version: int = 0
    """The version of the parameters when training began: a number that grows with each change of one."""
    left_in_eval: list[str] = field(default_factory=list)
    """The submodules that the fit found in eval mode and would train, until its first epoch begins."""
    should_stop: bool = False
    """Whether a hook asked to end training."""
    next_log: float = math.inf
    """The next global step at which the loggers get the step's values."""
    next_check: float = math.inf
    """The next global step after which to ask whether training is over: the last one, or a meeting of the ranks."""
    num_batches: float = 0
    """Micro-batches of the epoch; infinity if only reading can tell."""
    validates_inside: bool = False
    """Whether the epoch has validations before its end."""
    validation_interval: float = 1
    """Micro-batches between the validations inside an epoch."""
    validation_amount: int = 0
    """Samples or tokens that had been seen when it was last asked whether a validation is due."""
    validated_at: int = -1
    """The global step of the newest validation."""
    validated_seconds: float = 0.0
    """The training time of the newest validation, or of the start, on the clock that all ranks agree on."""
    batch_indices: list[int] = field(default_factory=list)
    """The sample indices of the current or last evaluation batch; empty if unknown."""
    predictions: list[Any] | None = None
    """The predictions for each loader; those of all ranks from the end of the epoch on."""
    prediction_indices: list[list[list[int]]] = field(default_factory=list)
    """The sample indices of all ranks' predictions, for each batch of each loader."""
    last_checkpoint: Path | None = None
    """The newest checkpoint of this run that training can be resumed from."""
    known_folders: set[Path] = field(default_factory=set)
    """The folders whose checkpoints are all older than what this run saves next."""
    checkpoint_seconds: float = 0.0
    """The time for which training has waited for checkpoints and snapshots."""
    is_taking_snapshot: bool = False
    """Whether the state is being taken for a snapshot in memory."""
    accumulate_grad_batches: int = 1
    """Micro-batches per step, from the next epoch on."""
    found: dict[str, float] = field(default_factory=dict)
    """The attributes of module and data module that finders have set."""
