"""TrainState: the counters of a run, which are saved; TrainerState: what the trainer does, which is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from ...callbacks.run import Stage
from ...strategies.errors import CheckpointError
from ...strategies.state.schema import COUNT, INTEGER, SECONDS, check, shown

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
    "seconds": SECONDS,
    "data_size": COUNT,
    "global_batch_size": (COUNT, None),
}


@dataclass(slots=True)
class TrainState:
    """Where a run is. Between two optimizer steps this, the weights and the random generators say everything."""

    seed: int = 0
    """What the order of the samples is made of, with the epoch."""
    global_step: int = 0
    """Optimizer steps completed."""
    optimizer_steps: list[int] = field(default_factory=list)
    """How often each optimizer was stepped; in manual optimization not once a step each."""
    skipped_steps: int = 0
    """Updates that were left out because scaled gradients overflowed (16-mixed)."""
    epoch: int = 0
    """The epoch that runs, or that has just been completed."""
    is_epoch_done: bool = False
    """Whether everything due at the end of `epoch` has been done."""
    batches_in_epoch: int = 0
    """Micro-batches of this epoch that this rank has trained on."""
    batches_before_epoch: int = 0
    """Micro-batches of the epochs before this one that this rank has trained on."""
    samples_seen: int = 0
    """Samples of all epochs that all ranks have trained on."""
    seconds: float = 0.0
    """Time spent in training, for ``max_time``."""
    data_size: int = 0
    """For how many data ranks the run began: what the loaders' batch size and the accumulation are meant for."""
    global_batch_size: int | None = None
    """Samples of an optimizer step; None where the data does not tell."""
    is_epoch_over: bool = False
    """Whether the epoch has ended for this run, its checkpoint included; not saved, since a resumed run may go on."""

    def begin_epoch(self) -> None:
        """Go to the next epoch, unless this one is still running (or has been resumed)."""
        if self.is_epoch_done:
            self.epoch += 1
            self.batches_before_epoch += self.batches_in_epoch
            self.batches_in_epoch = 0
            self.is_epoch_done = False
        self.is_epoch_over = False

    @property
    def current_epoch(self) -> int:
        """The epoch that runs, from 0; before and after, the number of epochs that have ended."""
        return self.epoch + self.is_epoch_over

    @property
    def batches_seen(self) -> int:
        """Micro-batches of all epochs that this rank has trained on."""
        return self.batches_before_epoch + self.batches_in_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return all numbers that are saved."""
        return {name: value for name, value in asdict(self).items() if name != _UNSAVED}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take all numbers back.

        Raises:
            CheckpointError: if they are not those of a TrainState.
        """
        check(state_dict, dict, "The saved training state")
        if state_dict.keys() != _SCHEMA.keys():
            raise CheckpointError(
                f"The saved training state holds {shown(sorted(map(str, state_dict)))}, not {sorted(_SCHEMA)}; "
                "it is of another version of echelon: load the weights only (echelon.load_weights)."
            )
        check(state_dict, _SCHEMA, "The saved training state")
        for name, value in state_dict.items():
            setattr(self, name, value)
        self.is_epoch_over = self.is_epoch_done


@dataclass(frozen=True)
class TrainerState:
    """What a trainer does; the strings equal the members of Lightning's enums."""

    status: Status = "initializing"
    """Of the current or last run: ``interrupted`` by a signal or an error."""
    fn: Literal["fit", "validate", "test", "predict"] | None = None
    """Which method runs, or ran last."""
    stage: Stage | None = None
    """What is running in it; None before and after."""

    @property
    def finished(self) -> bool:
        """Whether the last run came to its end."""
        return self.status == "finished"

    @property
    def stopped(self) -> bool:
        """Whether the last run has ended, one way or the other."""
        return self.status in ("finished", "interrupted")
