"""Lightning's classes and functions that libraries subclass or call, made from Echelon's and torch's."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from ..callbacks import Callback, ModelSummary, ProgressDisplay
from ..callbacks.dispatch import overrides_method
from ..callbacks.run import Run
from ..strategies.devices.kinds import device_type_of, is_available, num_devices
from ..trainer.module.data_module import DataModule
from ..trainer.module.train_module import TrainModule
from .checkpoint_files import load_checkpoint

__all__ = [
    "Accelerator",
    "AcceleratorChoice",
    "AcceleratorRegistry",
    "AsyncCheckpointIO",
    "CPUAccelerator",
    "CUDAAccelerator",
    "CheckpointIO",
    "MPSAccelerator",
    "ProgressBar",
    "Registry",
    "RichModelSummary",
    "RunningStage",
    "StrategyRegistry",
    "TorchCheckpointIO",
    "TrainerFn",
    "TrainerStatus",
    "XLAAccelerator",
    "cli_lightning_logo",
    "is_overridden",
    "num_cuda_devices",
]

# --- the state of a trainer, in Lightning's words ---


class TrainerFn(StrEnum):
    """The methods of a trainer."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(StrEnum):
    """The stages of these methods."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether it is an evaluation."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str:
        """The first part of the names of its loaders and limits."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else self.value


class TrainerStatus(StrEnum):
    """The status of a trainer."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"


# --- bases ---


class ProgressBar(Callback, ABC):
    """Base of progress bars; a trainer with one of these shows no other bar."""

    def __init__(self) -> None:
        self._trainer: Run | None = None
        self._current_eval_dataloader_idx: int | None = None

    @property
    def trainer(self) -> Any:
        """The trainer of the current run.

        Raises:
            TypeError: before the first run, as in Lightning.
        """
        if self._trainer is None:
            raise TypeError(f"{type(self).__name__}.trainer is None before a run; read it in hooks.")
        return self._trainer

    def setup(self, trainer: Run, module: Any, stage: str) -> None:
        self._trainer = trainer
        if not trainer.is_global_zero:
            self.disable()

    # what stands before a bar, for a subclass that makes or overrides it
    sanity_check_description: Any = "Sanity Checking"
    train_description: Any = "Training"
    validation_description: Any = "Validation"
    test_description: Any = "Testing"
    predict_description: Any = "Predicting"

    def disable(self) -> None:
        """Show nothing; override it."""

    def enable(self) -> None:
        """Show again; override it."""

    def print(self, *values: Any, **options: Any) -> None:
        """Print as Python's ``print``; override it to keep the bar in its place."""
        print(*values, **options)  # noqa: T201 - what it is for

    def get_metrics(self, trainer: Run, module: Any) -> dict[str, Any]:
        """Return the numbers behind the bar: those logged with ``prog_bar=True``, and the logger's version."""
        return {**get_standard_metrics(trainer), **trainer.progress_bar_metrics}

    @property
    def total_train_batches(self) -> int | float:
        """Batches per epoch."""
        count: int | float = self.trainer.num_training_batches
        return count

    @property
    def total_val_batches(self) -> int | float:
        """Batches per validation; 0 in an epoch of a fit that ends without one."""
        trainer = self.trainer
        every = trainer.check_val_every_n_epoch if trainer.training else None
        counts: Sequence[int | float] = trainer.num_val_batches
        return sum(counts) if every is None or (trainer.current_epoch + 1) % every == 0 else 0

    @property
    def total_val_batches_current_dataloader(self) -> int | float:
        """Batches of the current validation loader, or of the sanity check."""
        trainer = self.trainer
        counts = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
        return counts[self._current_eval_dataloader_idx or 0]  # type: ignore[no-any-return]

    @property
    def total_test_batches_current_dataloader(self) -> int | float:
        """Batches of the current test loader."""
        return self.trainer.num_test_batches[self._current_eval_dataloader_idx or 0]  # type: ignore[no-any-return]

    @property
    def total_predict_batches_current_dataloader(self) -> int | float:
        """Batches of the current prediction loader."""
        return self.trainer.num_predict_batches[self._current_eval_dataloader_idx or 0]  # type: ignore[no-any-return]

    def has_dataloader_changed(self, dataloader_idx: int) -> bool:
        """Return whether the loader has changed since the last call."""
        before, self._current_eval_dataloader_idx = self._current_eval_dataloader_idx, dataloader_idx
        return before != dataloader_idx


def get_standard_metrics(trainer: Run) -> dict[str, Any]:
    """Return what a bar shows beside the logged numbers: the logger's version."""
    version = trainer.loggers[0].version if trainer.loggers else None
    return {} if version is None else {"v_num": version[-4:] if isinstance(version, str) else version}


ProgressBar.register(ProgressDisplay)  # type: ignore[type-abstract]


class RichModelSummary(ModelSummary):
    """`ModelSummary` under this name; its table is drawn without rich."""

    def __init__(self, max_depth: int = 1, **options: Any) -> None:
        super().__init__(max_depth)


class CheckpointIO:
    """Base of checkpoint plugins, which a trainer ignores: Echelon reads and writes its checkpoints itself."""


class TorchCheckpointIO(CheckpointIO):
    """Lightning's plugin for pickled files, which does nothing here."""

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the state of an Echelon checkpoint, under Lightning's names."""
        state: dict[str, object] = load_checkpoint(path)
        return state


class AsyncCheckpointIO(CheckpointIO):
    """Lightning's plugin for saving beside the steps, as Echelon always does.

    Args:
        checkpoint_io: the plugin that it would call.
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self.checkpoint_io = checkpoint_io


class Accelerator:
    """Base of accelerators, of which a trainer takes those below; ``str`` returns the name."""

    device_type: str = ""

    @classmethod
    def name(cls) -> str:
        """Return the name that a trainer takes."""
        return cls.device_type

    def __str__(self) -> str:
        return self.device_type

    def __eq__(self, other: object) -> bool:
        return other == self.device_type if isinstance(other, str) else type(other) is type(self)

    def __hash__(self) -> int:
        return hash(self.device_type)

    @classmethod
    def is_available(cls) -> bool:
        """Return whether there is such a device."""
        return is_available(cls.device_type)

    @classmethod
    def auto_device_count(cls) -> int:
        """Return the number of devices that ``devices="auto"`` takes."""
        return num_devices(cls.device_type)


class CPUAccelerator(Accelerator):
    """The CPU."""

    device_type = "cpu"


class CUDAAccelerator(Accelerator):
    """CUDA devices."""

    device_type = "cuda"


class MPSAccelerator(Accelerator):
    """The GPU of a Mac."""

    device_type = "mps"


class XLAAccelerator(Accelerator):
    """TPUs, where the package torch_tpu has registered them."""

    device_type = "tpu"


ACCELERATORS: Final = {
    kind.device_type: kind for kind in (CPUAccelerator, CUDAAccelerator, MPSAccelerator, XLAAccelerator)
}
"""The accelerators by the type of their devices."""


def accelerator_for(device_type: str) -> Accelerator:
    """Return the accelerator of a type of device, which may be one that has no class of its own here."""
    known = ACCELERATORS.get(device_type)
    if known is not None:
        return known()
    accelerator: Accelerator = type(f"{device_type.upper()}Accelerator", (Accelerator,), {"device_type": device_type})()
    return accelerator


class Registry(dict[str, Any]):
    """Names that a library registers; a trainer knows only its own names, and refuses the others."""

    def register(self, name: str, kind: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Register a name; without a class, return a decorator."""
        if kind is None:
            return lambda decorated: self.register(name, decorated)
        self[name] = kind
        return kind


AcceleratorRegistry: Final = Registry()
StrategyRegistry: Final = Registry()


class AcceleratorChoice:
    """The accelerator and the devices that ``"auto"`` chooses, which libraries read from Lightning's connector."""

    def __init__(self, accelerator: str = "auto", devices: Any = "auto", **_: Any) -> None:
        self._accelerator_flag = device_type_of(accelerator)
        count = num_devices(self._accelerator_flag)
        self._devices_flag = count if devices == "auto" else devices


# --- functions ---


def num_cuda_devices() -> int:
    """Return the number of GPUs."""
    return CUDAAccelerator.auto_device_count()


def cli_lightning_logo() -> None:
    """Do nothing: Lightning prints its logo."""


def is_overridden(method: str, instance: object, parent: type | None = None) -> bool:
    """Return whether an object's class defines a method other than its base's."""
    if instance is None:
        return False
    if parent is None:
        parent = next((kind for kind in (TrainModule, DataModule, Callback) if isinstance(instance, kind)), None)
    if parent is None:
        raise ValueError(
            f"Expected a parent: give the base of {type(instance).__name__}, which is not one of Lightning's."
        )
    return hasattr(parent, method) and overrides_method(instance, method, parent)
