"""Progress: the state of a run that is not saved, as a resumed run works it out again."""

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
    """Where a run is inside its epoch, beside the counters of `TrainState`."""

    stage: Stage | None = None
    batch_idx: int = 0
    """Of the micro-batch that runs, or ran last."""
    micro_batch: MicroBatch | None = None
    """The training micro-batch that runs, or ran last."""
    is_in_step: bool = False
    """Whether a training micro-batch has begun whose gradients have not updated the parameters yet."""
    first_version: int = 0
    """What training began with: a number that grows with each change of a parameter."""
    should_stop: bool = False
    """Whether a hook asked to end training."""
    next_log: float = math.inf
    """The global step at which the loggers get the step's values."""
    next_check: float = math.inf
    """The global step after which to ask whether training is over: the last one, or when the ranks meet."""
    loaded_in: dict[LoaderKind, float] = field(default_factory=dict)
    """The epoch for which the loaders were asked for last."""
    num_batches: float = 0
    """Micro-batches of the epoch; infinity where only reading tells."""
    validates_inside: bool = False
    """Whether the epoch has validations before its end."""
    validation_interval: float = 1
    """Micro-batches between the validations inside an epoch."""
    validated_at: int = -1
    """The global step of the newest validation."""
    validated_seconds: float = 0.0
    """The training time of the newest validation, or of the beginning, on the clock that all ranks agree on."""
    batch_indices: list[int] = field(default_factory=list)
    """Of the samples of the evaluation batch that runs, or ran last; empty where they are not known."""
    predictions: list[Any] | None = None
    """Of each loader; of all ranks from the end of the epoch on."""
    prediction_indices: list[list[list[int]]] = field(default_factory=list)
    """Of the samples of all ranks' predictions, for each batch of each loader."""
    last_checkpoint: Path | None = None
    """The newest checkpoint of this run that training can be resumed from."""
    known_folders: set[Path] = field(default_factory=set)
    """The folders whose checkpoints all are older than what this run saves next."""
    checkpoint_seconds: float = 0.0
    """How long training has waited for checkpoints and snapshots."""
    is_taking_snapshot: bool = False
    """Whether the state is being taken for a snapshot in memory."""
    accumulate_grad_batches: int = 1
    """Micro-batches of a step, from the next epoch on."""
    found: dict[str, float] = field(default_factory=dict)
    """The attributes of module and data module that finders have set."""
