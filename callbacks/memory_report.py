"""MemoryReport: print the memory that each rank uses, beside what its strategy is expected to use."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.console import say
from ..common.errors import ConfigError
from ..common.table import render_boxed_table
from ..strategies.devices.memory import peak_allocated
from ..strategies.module.memory_estimate import KeptForBackward, expected_memory, held_memory
from .callback import Callback
from .run import Run

_KINDS: Final = ("parameters", "gradients", "optimizer state", "activations", "GPU memory, at most")


class MemoryReport(Callback):
    """Print the memory of parameters, gradients, optimizer state and activations after the first steps.

    Each measured number is that of the rank with the most: its shards of parameters, of gradients before an update and
    of the state after it, and the activations that forward keeps for backward in one micro-batch (but not in the
    threads of ``strategy="dp"``). The expected numbers follow from the strategy's sharding, as in ZeRO (Rajbhandari et
    al., 2020). Counting activations slows these steps down.

    The hooks run on every rank, and rank 0 prints. After the report they do nothing.

    Args:
        num_steps: the number of optimizer steps to measure.

    Raises:
        ConfigError: for a number below 1.

    Example::

        Trainer(max_epochs=1, callbacks=MemoryReport()).fit(module, train_loader)
    """

    def __init__(self, num_steps: int = 2) -> None:
        if num_steps < 1:
            raise ConfigError(f"num_steps must be 1 or more, got {num_steps}.")
        self._num_steps = num_steps
        self.measured: dict[str, float] = {}
        """In bytes, on the rank with the most; filled by the report, on every rank."""
        self.expected: dict[str, float] = {}
        """In bytes, per rank."""
        self._steps_left = num_steps
        self._kept: KeptForBackward | None = None
        self._gradients = self._activations = 0.0

    def state_dict(self) -> dict[str, object]:
        """Return the report."""
        return {"measured": self.measured, "expected": self.expected}

    def load_state_dict(self, state_dict: Any) -> None:
        """Restore the report."""
        self.measured, self.expected = dict(state_dict["measured"]), dict(state_dict["expected"])

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Start measuring."""
        self._steps_left, self._gradients, self._activations = self._num_steps, 0.0, 0.0

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: object, batch_idx: int) -> None:
        """Count the activations that forward keeps."""
        self._begin()

    def on_before_backward(self, trainer: Run, module: nn.Module, loss: Tensor) -> None:
        """Stop counting, since forward is over."""
        self._end()

    def on_after_backward(self, trainer: Run, module: nn.Module) -> None:
        """Count again, for a step with several backward passes."""
        self._begin()

    def on_before_optimizer_step(self, trainer: Run, module: nn.Module, optimizer: Optimizer) -> None:
        """Measure the gradients, which are complete now."""
        self._end()
        if self._steps_left:
            self._gradients = max(self._gradients, held_memory(module, []).gradients)

    def on_train_batch_end(
        self, trainer: Run, module: nn.Module, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Stop counting, also in a step without a backward pass."""
        self._end()

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Report after the last measured step."""
        if self._steps_left:
            self._steps_left -= 1
            if not self._steps_left:
                self._report(trainer, module)

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Report if training ends earlier, but not without a step."""
        if 0 < self._steps_left < self._num_steps:
            self._steps_left = 0
            self._report(trainer, module)

    def on_exception(self, trainer: Run, module: nn.Module, exception: BaseException) -> None:
        """Stop counting."""
        self._end()

    def _begin(self) -> None:
        if self._steps_left and self._kept is None:
            self._kept = KeptForBackward()
            self._kept.__enter__()

    def _end(self) -> None:
        if self._kept is not None:
            self._kept.__exit__()
            self._activations = max(self._activations, self._kept.num_bytes)
            self._kept = None

    def _report(self, trainer: Run, module: nn.Module) -> None:
        strategy, optimizers = trainer.strategy, list(trainer.optimizers)
        held = held_memory(module, optimizers)
        on_gpu = peak_allocated(strategy.device)
        own = [held.parameters, self._gradients, held.optimizer, self._activations, on_gpu]
        most = strategy.ranks.all.all_reduce([float(number) for number in own], "max")
        self.measured = dict(zip(_KINDS if on_gpu else _KINDS[:4], most, strict=False))
        expected = expected_memory(module, optimizers, strategy.memory_share)
        shared = strategy.ranks.all.all_reduce([expected.parameters, expected.gradients, expected.optimizer], "max")
        self.expected = dict(zip(_KINDS, shared, strict=False))
        if trainer.is_global_zero:
            say(self._table(strategy.world_size))

    def _table(self, world_size: int) -> str:
        where = "measured" if world_size == 1 else f"measured, most of {world_size} ranks"
        rows = [
            [kind, _format_size(self.measured.get(kind)), _format_size(self.expected.get(kind))] for kind in _KINDS[:4]
        ]
        rows += [[kind, _format_size(self.measured[kind]), "-"] for kind in _KINDS[4:] if kind in self.measured]
        return render_boxed_table(["Memory", where, "expected"], rows, "<>>")


def _format_size(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:.3f} MB"
