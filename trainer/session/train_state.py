"""TrainState: the saved counters of a run; TrainerState: what the trainer is doing, which is not saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from ...callbacks.run import Stage
from ...common.errors import CheckpointError
from ...strategies.state.schema import COUNT, INTEGER, SECONDS, TEXT, check_schema, format_as_line

Status = Literal["initializing", "running", "finished", "interrupted"]
_UNSAVED: Final = "is_epoch_over"
_SCHEMA: Final = {
    "seed": INTEGER,
    "global_step": COUNT,
    "optimizer_steps": [COUNT],
    "skipped_steps": COUNT,
    "epoch": COUNT,
    "is_epoch_done": bool,
    "batches_in_epoch": COUNT,
    "batches_before_epoch": COUNT,
    "samples_seen": COUNT,
    "tokens_seen": COUNT,
    "seconds": SECONDS,
    "data_size": COUNT,
    "global_batch_size": (COUNT, None),
    "loaded_in": {TEXT: COUNT},
    "steps_per_epoch": (COUNT, None),
    "scheduled_epochs": COUNT,
}
_OPTIONAL: Final = frozenset(["loaded_in", "steps_per_epoch", "scheduled_epochs", "tokens_seen"])


@dataclass(slots=True)
class TrainState:
    """The position of a run. Between two optimizer steps this, weights and random generators determine everything."""

    seed: int = 0
    """The seed that, with the epoch, determines the order of the samples."""
    global_step: int = 0
    """Optimizer steps completed."""
    optimizer_steps: list[int] = field(default_factory=list)
    """The number of steps of each optimizer; in manual optimization this may differ from `global_step`."""
    skipped_steps: int = 0
    """Updates that were skipped because scaled gradients overflowed (16-mixed)."""
    epoch: int = 0
    """The current epoch, or the one that was just completed."""
    is_epoch_done: bool = False
    """Whether everything due at the end of `epoch` has been done."""
    batches_in_epoch: int = 0
    """Micro-batches of this epoch that this rank has trained on."""
    batches_before_epoch: int = 0
    """Micro-batches of the epochs before this one that this rank has trained on."""
    samples_seen: int = 0
    """Samples of all epochs that all ranks have trained on."""
    tokens_seen: int = 0
    """Tokens of all epochs that all ranks have trained on, if a setting needs them."""
    seconds: float = 0.0
    """Time spent in training, for ``max_time``."""
    data_size: int = 0
    """The data ranks with which the run began, for which batch size and accumulation were chosen."""
    global_batch_size: int | None = None
    """Samples per optimizer step; None if the data does not tell."""
    loaded_in: dict[str, int] = field(default_factory=dict)
    """The epoch in which loaders were last requested, for training (``train``) and validation (``validate``)."""
    steps_per_epoch: int | None = None
    """Optimizer steps per epoch with the first training loaders; None if only reading tells."""
    scheduled_epochs: int = 0
    """The epochs at whose end learning rate schedulers have stepped."""
    is_epoch_over: bool = False
    """Whether the epoch has ended for this run, its checkpoint included; not saved, since a resumed run may go on."""

    def begin_epoch(self) -> None:
        """Move on to the next epoch, unless this one is still running (or was resumed)."""
        if self.is_epoch_done:
            self.epoch += 1
            self.batches_before_epoch += self.batches_in_epoch
            self.batches_in_epoch = 0
            self.is_epoch_done = False
        self.is_epoch_over = False

    def count(self, batches: int, samples: int) -> None:
        """Count micro-batches of this rank and samples of all ranks that were trained on."""
        self.batches_in_epoch += batches
        self.samples_seen += samples

    def go_to(self, batches_in_epoch: int) -> None:
        """Be at another micro-batch of the epoch, as one cut in another way or shown to a hook."""
        self.batches_in_epoch = batches_in_epoch

    @contextmanager
    def as_in_epoch(self, epoch: int) -> Iterator[None]:
        """Tell hooks inside that this is the current epoch."""
        now = self.epoch, self.is_epoch_done, self.is_epoch_over
        self.epoch, self.is_epoch_done, self.is_epoch_over = epoch, False, False
        try:
            yield
        finally:
            self.epoch, self.is_epoch_done, self.is_epoch_over = now

    @property
    def current_epoch(self) -> int:
        """The current epoch, from 0; before and after, the number of epochs that have ended."""
        return self.epoch + self.is_epoch_over

    @property
    def is_between_epochs(self) -> bool:
        """Whether the epoch has not begun, or is complete."""
        return self.is_epoch_done or self.batches_in_epoch == 0

    @property
    def is_inside_epoch(self) -> bool:
        """Whether the epoch has begun, and has not ended for this run either."""
        return not (self.is_between_epochs or self.is_epoch_over)

    @property
    def batches_seen(self) -> int:
        """Micro-batches of all epochs that this rank has trained on."""
        return self.batches_before_epoch + self.batches_in_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return all saved counters."""
        return {name: value for name, value in asdict(self).items() if name != _UNSAVED}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Restore all counters.

        Raises:
            CheckpointError: if they are not those of a TrainState.
        """
        check_schema(state_dict, dict, "The saved training state")
        if state_dict.keys() | _OPTIONAL != _SCHEMA.keys():
            raise CheckpointError(
                f"The saved training state holds {format_as_line(sorted(map(str, state_dict)))}, not "
                f"{sorted(_SCHEMA)}; it is of another version of echelon: load the weights only (echelon.load_weights)."
            )
        check_schema(state_dict, {name: _SCHEMA[name] for name in state_dict}, "The saved training state")
        for name, value in {"scheduled_epochs": 0, "tokens_seen": 0, **state_dict}.items():
            setattr(self, name, value)
        self.is_epoch_over = self.is_epoch_done


@dataclass(frozen=True)
class TrainerState:
    """What a trainer is doing; the strings equal the members of Lightning's enums."""

    status: Status = "initializing"
    """The status of the current or last run; ``interrupted`` by a signal or an error."""
    fn: Literal["fit", "validate", "test", "predict"] | None = None
    """The current or last method."""
    stage: Stage | None = None
    """The stage that is running in it; None before and after."""

    @property
    def finished(self) -> bool:
        """Whether the last run completed."""
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        """Whether the last run has ended, however it ended."""
        return self.status in ("finished", "interrupted")
