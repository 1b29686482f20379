"""SpikeDetection: end training when the loss jumps, and write which batches to leave out."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from ...callbacks.callback import Callback
from ...callbacks.helpers.loggers import local_folder
from ...callbacks.run import Run
from ...common.errors import ConfigError, RunError
from ...common.storage import any_path, as_path
from ...strategies import Strategy


class TrainingSpikeException(RunError):  # noqa: N818 - Lightning's name
    """Raised on every rank after a batch whose loss is a spike.

    Args:
        batch_idx: the index of the batch.
        path: the file that lists the batches to leave out.
    """

    def __init__(self, batch_idx: int, path: str | Path = "skip_batches.json") -> None:
        super().__init__(
            f"Training spike detected in batch {batch_idx}: its loss is far from the mean of the last ones; leave out "
            f"the batches that {path} lists, or use LossSpikePolicy, which skips such steps and goes on."
        )
        self.batch_idx = batch_idx

    def __reduce__(self) -> Any:
        return type(self), (self.batch_idx,)


class FabricSpikeDetection:
    """Raise a `TrainingSpikeException` if a rank's loss is a spike, for your own loop with `Fabric`.

    A loss is a spike if it is worse than the one before, and differs from the mean of the last ones by at least `atol`
    and by at least `rtol` times that mean. This batch and the one before are added to `exclude_batches_path`. Every
    rank calls `on_train_batch_end`, with its own loss.

    Args:
        mode: whether ``min`` or ``max`` of the loss is better.
        window: the number of losses in the mean.
        warmup: the number of batches before the first check.
        atol: the absolute tolerance; None: any.
        rtol: the relative tolerance; None: any.
        exclude_batches_path: a JSON file, or the folder for ``skip_batches.json``; by default the current folder.
        finite_only: a loss that is not finite is a spike; otherwise it is left out of the mean.

    Raises:
        ConfigError: for invalid arguments.
    """

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | Path | None = None,
        *,
        finite_only: bool = True,
    ) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"mode must be 'min' or 'max', got {mode!r}; give one of them.")
        if window < 1:
            raise ConfigError(f"window must be 1 or more losses, got {window}; give 10, for example.")
        self.mode, self.warmup, self.atol, self.rtol, self.finite_only = mode, warmup, atol, rtol, finite_only
        if exclude_batches_path is not None:
            any_path("exclude_batches_path", exclude_batches_path)
        self.exclude_batches_path = exclude_batches_path
        self.last_val = 0.0
        self.bad_batches: list[int] = []
        self._losses: deque[float] = deque(maxlen=window)

    def on_train_batch_end(self, fabric: Any, loss: Tensor, batch: Any, batch_idx: int) -> None:
        """Judge the loss of a batch. Collective: every rank calls it.

        Raises:
            TrainingSpikeException: if that of any rank is a spike.
        """
        self.judge(fabric.strategy, loss, batch_idx, self.exclude_batches_path or Path.cwd())

    def judge(self, strategy: Strategy, loss: Tensor, batch_idx: int, path: str | Path) -> None:
        """Judge the loss of a batch, and list batches in a file at `path`, as `on_train_batch_end` does."""
        value = float(loss.detach())
        is_spike = batch_idx >= self.warmup and self._is_spike(value)
        spikes, unfit = strategy.ranks.all.all_reduce([float(is_spike), float(not math.isfinite(value))], "max")
        if spikes:
            self.bad_batches += [batch_idx - 1, batch_idx]
            file = as_path(path) if str(path).endswith(".json") else as_path(path) / "skip_batches.json"
            if strategy.rank == 0:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(self.bad_batches, indent=4), encoding="utf-8")
            raise TrainingSpikeException(batch_idx, str(file))
        if self.finite_only or not unfit:
            self._losses.append(value)
            self.last_val = value

    def _is_spike(self, value: float) -> bool:
        if self.finite_only and not math.isfinite(value):
            return True
        change = value - self.last_val
        if not self._losses or (change <= 0 if self.mode == "min" else change >= 0):
            return False
        mean = sum(self._losses) / len(self._losses)
        is_far = self.atol is None or abs(value - mean) >= abs(self.atol)
        return is_far and (self.rtol is None or abs(value - mean) >= abs(self.rtol * mean))

    def state_dict(self) -> dict[str, Any]:
        """Return the losses in the mean, and the batches to leave out."""
        return {"last_val": self.last_val, "bad_batches": list(self.bad_batches), "losses": list(self._losses)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore them."""
        self.last_val, self.bad_batches = state_dict["last_val"], list(state_dict["bad_batches"])
        self._losses.clear()
        self._losses.extend(state_dict["losses"])


class SpikeDetection(Callback):
    """End training with a `TrainingSpikeException` when the loss jumps; `LossSpikePolicy` skips the step and goes on.

    The arguments are those of `FabricSpikeDetection`; by default the file is in the trainer's ``default_root_dir``. The
    exception comes from every rank, after the update of the batch.
    """

    def __init__(
        self,
        mode: Literal["min", "max"] = "min",
        window: int = 10,
        warmup: int = 1,
        atol: float | None = None,
        rtol: float | None = 2.0,
        exclude_batches_path: str | Path | None = None,
        *,
        finite_only: bool = True,
    ) -> None:
        self._detection = FabricSpikeDetection(
            mode, window, warmup, atol, rtol, exclude_batches_path, finite_only=finite_only
        )

    @property
    def bad_batches(self) -> list[int]:
        """The batches to leave out."""
        return self._detection.bad_batches

    def on_train_batch_end(self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Judge the loss. Collective: every rank calls it."""
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs
        if not isinstance(loss, Tensor):
            raise ConfigError(
                f"SpikeDetection needs the loss that training_step returns, got {type(loss).__name__}; return a tensor."
            )
        path = self._detection.exclude_batches_path or local_folder(trainer.default_root_dir)
        self._detection.judge(trainer.strategy, loss, batch_idx, path)

    def state_dict(self) -> dict[str, Any]:
        """Return the losses in the mean, and the batches to leave out."""
        return self._detection.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore them."""
        self._detection.load_state_dict(state_dict)
