"""ThroughputMonitor: log the speed of training, and its fraction of the device's peak."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from time import monotonic
from typing import Any, NamedTuple

from torch import nn

from ..common.errors import ConfigError
from .callback import Callback
from .helpers.flop_count import counted_flops
from .helpers.peak_flops import peak_flops
from .run import Run


class ThroughputMonitor(Callback):
    """Log samples, tokens and batches per second, and MFU, whenever the trainer logs a step.

    ``throughput/samples_per_sec`` and ``throughput/tokens_per_sec`` are those of all ranks together;
    ``batches_per_sec`` (micro-batches), ``flops_per_sec`` and ``mfu`` are those of one rank. Each is the mean over the
    last `window_size` steps. ``throughput/samples``, ``tokens`` and ``seconds`` are totals since the very first `fit`,
    including resumed runs. The time is that of training without validation, on the host's clock: nothing waits for the
    device. The hooks run on every rank, and rank 0 logs; with one of the two functions, the ranks sum their counts at
    logged steps. A step that is not logged costs 0.6 us and the time of the functions.

    MFU (Chowdhery et al. 2022) is the model's FLOPs per second divided by the device's peak. With activation
    checkpointing, the counted FLOPs include the recomputation: set `flops_per_batch` then.

    Args:
        batch_size_fn: returns the number of samples in a micro-batch of this rank; by default the trainer's count.
        length_fn: returns the number of tokens in a micro-batch of this rank; by default the trainer's count, if a
            setting counts tokens (``max_tokens``, an interval in tokens).
        window_size: the number of steps to average over.
        separator: the text between ``throughput`` and the name of a metric.
        flops_per_batch: FLOPs of one micro-batch on one rank, forward and backward; None: if the peak is known, they
            are counted once, in the first micro-batch of the run, by ``torch.utils.flop_counter``.
        available_flops: the peak of one device in FLOP/s; None: looked up by the name of the GPU and the precision.

    Raises:
        ConfigError: for a window, a peak or a count that is not positive.

    Example::

        monitor = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]))
        Trainer(max_epochs=1, callbacks=monitor, log_every_n_steps=2).fit(module, train_loader)
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        *,
        window_size: int = 100,
        separator: str = "/",
        flops_per_batch: float | None = None,
        available_flops: float | None = None,
    ) -> None:
        limits = {"window_size": window_size, "flops_per_batch": flops_per_batch, "available_flops": available_flops}
        for name, value in limits.items():
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0, got {value}.")
        self._batch_size_fn = batch_size_fn
        self._length_fn = length_fn
        self._window_size = window_size
        self._separator = separator
        self._flops_per_batch = flops_per_batch
        self._available_flops = available_flops
        self._peak: float | None = None
        self._counter: Any = None
        self._count = ExitStack()
        self._window: deque[_Reading] = deque()
        self._forget()

    def _forget(self) -> None:
        self._batches = 0
        self._counted = {"samples": 0, "tokens": 0}
        self._counted_here = {"samples": 0, "tokens": 0}
        self._seconds = 0.0
        self._resumed_at: float | None = None

    # --- hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Forget the previous fit; `load_state_dict` follows if this one is resumed."""
        if stage == "fit":
            self._forget()

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Look up the peak and start the clock."""
        self._peak = self._available_flops
        if self._peak is None:
            self._peak = peak_flops(trainer.strategy.device, trainer.strategy.precision)
        self._resumed_at = monotonic()
        self._window = deque([self._read(trainer)])

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: object, batch_idx: int) -> None:
        """Count the FLOPs of the first micro-batch, if MFU needs them."""
        if self._flops_per_batch is None and self._peak is not None and self._counter is None:
            self._count = ExitStack()
            self._counter = self._count.enter_context(counted_flops())

    def on_train_batch_end(
        self, trainer: Run, module: nn.Module, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Count the micro-batch."""
        self._batches += 1
        if self._batch_size_fn is not None:
            self._counted_here["samples"] += self._batch_size_fn(batch)
        if self._length_fn is not None:
            self._counted_here["tokens"] += self._length_fn(batch)
        if self._counter is not None:
            self._end_counting(trainer)

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Log if the trainer logs this step; collective with one of the two functions."""
        if not trainer.is_log_step:
            return
        if self._batch_size_fn is not None or self._length_fn is not None:
            self._add_up(trainer)
        if trainer.global_step > self._window[0].step:
            trainer.log_metrics(self._measure(self._read(trainer)))

    def on_validation_start(self, trainer: Run, module: nn.Module) -> None:
        """Stop the clock."""
        self._stop()

    def on_validation_end(self, trainer: Run, module: nn.Module) -> None:
        """Restart the clock if training continues."""
        if self._window:
            self._resumed_at = monotonic()

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Stop the clock and drop the window."""
        self._stop()
        self._window.clear()

    def on_exception(self, trainer: Run, module: nn.Module, exception: BaseException) -> None:
        """Stop the clock and the count of FLOPs."""
        self._count.close()
        self._counter = None
        self.on_train_end(trainer, module)

    def __getstate__(self) -> dict[str, object]:
        """Leave out the count of FLOPs, which belongs to this process."""
        return {**self.__dict__, "_counter": None, "_count": ExitStack()}

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the totals; samples and tokens counted since the last logged step are this rank's."""
        counted = {name: count + self._counted_here[name] for name, count in self._counted.items()}
        return {"seconds": self._elapsed(), "batches": self._batches, **counted}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the saved totals."""
        self._seconds = float(state_dict["seconds"])
        self._batches = int(state_dict["batches"])
        self._counted = {name: int(state_dict[name]) for name in self._counted}
        self._counted_here = dict.fromkeys(self._counted, 0)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _elapsed(self) -> float:
        return self._seconds + (monotonic() - self._resumed_at if self._resumed_at is not None else 0.0)

    def _stop(self) -> None:
        self._seconds = self._elapsed()
        self._resumed_at = None

    def _add_up(self, trainer: Run) -> None:
        """Add the counts of all ranks since the last time. Collective: every rank calls it."""
        counted = trainer.strategy.all_reduce(self._counted_here)
        self._counted = {name: count + counted[name] for name, count in self._counted.items()}
        self._counted_here = dict.fromkeys(self._counted, 0)

    def _read(self, trainer: Run) -> _Reading:
        # counts that are not summed yet are assumed to be the same on the other ranks
        size = trainer.strategy.data_size
        samples, tokens = (count + size * self._counted_here[name] for name, count in self._counted.items())
        if self._batch_size_fn is None:
            samples = trainer.samples_seen
        if self._length_fn is None:
            tokens = trainer.tokens_seen
        return _Reading(trainer.global_step, self._elapsed(), self._batches, samples, tokens)

    def _measure(self, now: _Reading) -> dict[str, float]:
        window = self._window
        window.append(now)
        while len(window) > 2 and now.step - window[1].step >= self._window_size:
            window.popleft()
        then = window[0]
        seconds = max(now.seconds - then.seconds, 1e-9)
        batches_per_sec = (now.batches - then.batches) / seconds
        measured = {
            "samples_per_sec": (now.samples - then.samples) / seconds,
            "batches_per_sec": batches_per_sec,
            "samples": float(now.samples),
            "seconds": now.seconds,
        }
        if now.tokens:
            measured["tokens_per_sec"] = (now.tokens - then.tokens) / seconds
            measured["tokens"] = float(now.tokens)
        if self._flops_per_batch is not None:
            measured["flops_per_sec"] = batches_per_sec * self._flops_per_batch
            if self._peak is not None:
                measured["mfu"] = measured["flops_per_sec"] / self._peak
        return {f"throughput{self._separator}{name}": value for name, value in measured.items()}

    def _end_counting(self, trainer: Run) -> None:
        """Take the count of FLOPs, and start a new window, since counting has slowed this micro-batch down."""
        assert self._counter is not None
        self._count.close()
        self._flops_per_batch = float(self._counter.get_total_flops())
        self._counter = None
        self._window = deque([self._read(trainer)])


class _Reading(NamedTuple):
    """All totals at the end of a step."""

    step: int
    seconds: float
    batches: int
    samples: int
    tokens: int
