"""BatchSizeFinder: find the largest micro-batch that fits into memory; the optimizer steps stay the same."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, ClassVar, Final, Literal, cast, get_args

from torch import nn

from ..common.console import say
from ..common.errors import ConfigError, ModuleError, RunError
from ..strategies import Strategy
from ..strategies.devices.queries import synchronize_device
from ..strategies.module.out_of_memory import is_out_of_memory, let_go_of
from ..strategies.state.schema import COUNT, NUMBER, check_schema
from .callback import Callback
from .finders.trials import new_axes, refuse_trials
from .run import Run, Tunable

Mode = Literal["power", "binsearch"]

_DEFAULT_NAME: Final = "batch_size"
_AT_A_TIME: Final = 2
"""Micro-batches of a trial step: during the second, the gradients of the first are in memory."""
_STATE: Final = {"batch_size": COUNT, "trials": [{"size": COUNT, "fits": bool, "samples_per_second": NUMBER}]}

_log = logging.getLogger(__name__)


class BatchSizeFinder(Callback):
    """Try larger and larger micro-batches when `fit` begins, until memory runs out, and train with the largest.

    The optimizer steps stay the same: the search determines how many samples go through the module at once, and the
    accumulation follows. A step has ``Trainer(global_batch_size=)`` samples, by default the loader's ``batch_size``
    times ``accumulate_grad_batches``, and no micro-batch is larger. The trial steps are undone. Layers that compute
    over the micro-batch, such as BatchNorm, see a different one.

    It searches in one process, for data from one DataLoader; a resumed run uses the size in its checkpoint.

    Args:
        mode: ``"power"`` doubles the size until it does not fit; ``"binsearch"`` then looks between the last two.
        steps_per_trial: optimizer steps with each size, after a first one that creates the optimizer's state.
        init_val: the first size; if it does not fit, it is halved until one does.
        max_trials: the maximum number of sizes to try.
        batch_arg_name: the attribute of module, data module or their ``hparams`` that gets the size, if there is one;
            a name other than the default must exist. If a loader is built with it for another `fit`, the steps are
            larger there, unless ``global_batch_size`` is given.
        margin: with ``"binsearch"``, the fraction of the found size that is left free.
        max_val: the largest size.

    Raises:
        ConfigError: for invalid arguments.

    Example::

        class Sizes(DataModule):
            batch_size = 2

            def train_dataloader(self):
                return DataLoader(train_loader.dataset, self.batch_size)

        finder = BatchSizeFinder(max_val=16)
        Trainer(max_epochs=1, callbacks=finder).fit(module, datamodule=Sizes())
        finder.optimal_batch_size
    """

    SUPPORTED_MODES: ClassVar[tuple[str, ...]] = get_args(Mode)

    def __init__(
        self,
        mode: Mode = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = _DEFAULT_NAME,
        *,
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> None:
        if mode not in self.SUPPORTED_MODES:
            raise ConfigError(
                f"BatchSizeFinder: mode should be either of {', '.join(self.SUPPORTED_MODES)}, got {mode!r}."
            )
        counts = {
            "steps_per_trial": steps_per_trial,
            "init_val": init_val,
            "max_trials": max_trials,
            "max_val": max_val,
        }
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(f"BatchSizeFinder: {name} must be 1 or more, got {value}.")
        if not 0 <= margin < 1:
            raise ConfigError(f"BatchSizeFinder: margin must be >= 0 and < 1, got {margin}; give 0.05, for example.")
        self._mode, self._steps_per_trial, self._init_val = mode, steps_per_trial, init_val
        self._max_trials, self._batch_arg_name = max_trials, batch_arg_name
        self._margin, self._max_val = margin, max_val
        self._is_fit = False
        self.optimal_batch_size: int | None = None
        """The size that was found; None before the search."""
        self.trials: list[dict[str, Any]] = []
        """The sizes tried, in order: ``size``, ``fits`` and ``samples_per_second`` (0 if it does not fit)."""

    # --- the search --------------------------------------------------------------------------------------------------

    def scale_batch_size(self, trainer: Run, module: nn.Module) -> None:
        """Search now, between two optimizer steps, and recut the steps.

        Raises:
            ConfigError: for data that is not cut by samples, and as in `validate`.
            ModuleError: as in `validate`.
        """
        tunable = cast(Tunable, trainer)
        if tunable.fast_dev_run:
            _log.info("BatchSizeFinder does not search in a development run (fast_dev_run=%s).", tunable.fast_dev_run)
            return
        self.validate(module, trainer.strategy, tunable.find_attribute)
        whole = tunable.samples_per_step
        most = self._max_val if whole is None else min(self._max_val, whole)
        self.trials = []
        say(f"BatchSizeFinder tries micro-batches of up to {most} samples.")
        size = self._search(tunable, most)
        tunable.set_micro_batch_size(size)
        self.optimal_batch_size = size
        if tunable.find_attribute(self._batch_arg_name):
            tunable.set_attribute(self._batch_arg_name, size, is_saved=False)
        parts = trainer.accumulate_grad_batches
        say(
            f"BatchSizeFinder sets micro-batches of {size} samples, {parts} per step; a step still has {whole} samples."
        )

    def validate(self, module: nn.Module, strategy: Strategy, find_attribute: Callable[..., str | None]) -> None:
        """Raise if this run cannot be searched; also called in the user's process, before others start.

        Args:
            module: the module to train.
            strategy: the strategy of the run.
            find_attribute: returns the first of some names that the module, the data module or their ``hparams`` have.

        Raises:
            ConfigError: with several processes, a strategy that cannot undo steps, or manual optimization.
            ModuleError: if there is no attribute with the given name.
        """
        num_processes = strategy.ranks.environment.world_size
        if num_processes > 1:
            raise ConfigError(
                f"BatchSizeFinder is not supported with distributed strategies, got {num_processes} processes: the "
                "others would wait for the one whose memory runs out; run it with devices=1 and give that "
                "batch_size, or see what fits with `echelon plan`."
            )
        refuse_trials("BatchSizeFinder", module, strategy)
        name = self._batch_arg_name
        if name != _DEFAULT_NAME and find_attribute(name) is None:
            raise ModuleError(
                f"BatchSizeFinder(batch_arg_name={name!r}) needs an attribute of that name in {type(module).__name__}, "
                "its data module or the hparams of either, found none; give the name of one that exists, or leave "
                "batch_arg_name out."
            )

    def _search(self, tunable: Tunable, most: int) -> int:
        """Return the largest size that fits, among those tried."""
        size, best, too_large = self.try_sizes(lambda size: self._fits(tunable, size), most)
        if self._mode == "binsearch" and best and too_large:
            best = max(1, int(best * (1 - self._margin)))
        # the allocator's fragmentation grows over many micro-batches
        while best and not self._fits(tunable, best, in_whole_steps=True):
            best = best // 2 if self._mode == "power" else int(best * 0.9)
        if not best:
            raise RunError(
                f"BatchSizeFinder found no size that fits: {size} samples did not fit into memory after "
                f"{len(self.trials)} trials; set a larger max_trials, or a smaller init_val."
            )
        return best

    def try_sizes(self, fits: Callable[[int], bool], most: int) -> tuple[int, int, int]:
        """Return the last size of the doubling or halving, the largest that `fits`, and the smallest that does not.

        The last two are 0 if there is none.
        """
        size, best, too_large = min(self._init_val, most), 0, 0
        while self._may_try():
            if fits(size):
                best = size
                if too_large or size == most:
                    break
                size = min(2 * size, most)
            else:
                too_large = size
                if best:
                    break
                size = max(1, size // 2)
        while self._mode == "binsearch" and best and too_large - best > 1 and self._may_try():
            middle = (best + too_large) // 2
            best, too_large = (middle, too_large) if fits(middle) else (best, middle)
        return size, best, too_large

    def _may_try(self) -> bool:
        return len(self.trials) < self._max_trials

    def _fits(self, tunable: Tunable, size: int, *, in_whole_steps: bool = False) -> bool:
        probe = _Probe()
        num_micro_batches = None if in_whole_steps else _AT_A_TIME
        try:
            tunable.try_steps(
                probe, self._steps_per_trial + 1, micro_batch_size=size, num_micro_batches=num_micro_batches
            )
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if size == 1:
                error.add_note(
                    "BatchSizeFinder: a micro-batch of 1 sample does not fit into memory; use a smaller model."
                )
                raise
            let_go_of(error)
            probe.samples_per_second = 0.0
        fits = probe.samples_per_second > 0
        self.trials.append({"size": size, "fits": fits, "samples_per_second": probe.samples_per_second})
        _log.info("Micro-batches of %d samples %s memory.", size, "fit into" if fits else "do not fit into")
        return fits

    def plot(self, show: bool = False, ax: Any = None) -> Any:
        """Plot the samples per second of the sizes that fit, mark those that do not, and return the figure.

        Args:
            show: open a window with it.
            ax: the Matplotlib axes to draw on; by default those of a new figure.

        Raises:
            MissingDependencyError: if Matplotlib is not installed.
            RunError: if no size was tried.
        """
        if not self.trials:
            raise RunError("BatchSizeFinder.plot needs sizes that were tried, found none; call fit with it first.")
        if ax is None:
            ax = new_axes()
        speeds: dict[int, float] = {}
        for one in self.trials:
            if one["fits"]:
                speeds[one["size"]] = max(one["samples_per_second"], speeds.get(one["size"], 0.0))
        sizes = sorted(speeds)
        ax.plot(sizes, [speeds[size] for size in sizes], "o-")
        for one in self.trials:
            if not one["fits"]:
                ax.axvline(one["size"], color="red", linestyle=":", label=f"{one['size']}: out of memory")
        if self.optimal_batch_size is not None:
            ax.axvline(self.optimal_batch_size, color="green", label=f"{self.optimal_batch_size}: taken")
        ax.set_xscale("log", base=2)
        ax.set_ylim(0)
        ax.set_xlabel("samples of a micro-batch")
        ax.set_ylabel("samples per second")
        ax.legend(frameon=False)
        if show:
            from matplotlib import pyplot

            pyplot.show()
        return ax.figure

    # --- hooks -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Note whether this is a fit, the only stage with a search."""
        self._is_fit = stage == "fit"

    def on_load_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Cut the steps of a resumed run as in its checkpoint, before its position is loaded."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if self._is_fit and state:
            check_schema(state, _STATE, "The saved state of BatchSizeFinder")
            cast(Tunable, trainer).set_micro_batch_size(state["batch_size"])

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Search, unless a resumed run already has the size."""
        if self.optimal_batch_size is None or trainer.global_step == 0:
            self.scale_batch_size(trainer, module)

    def state_dict(self) -> dict[str, Any]:
        """Return the size that was found, and the trials."""
        return {} if self.optimal_batch_size is None else {"batch_size": self.optimal_batch_size, "trials": self.trials}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore them."""
        check_schema(state_dict, _STATE, "The saved state of BatchSizeFinder")
        self.optimal_batch_size, self.trials = state_dict["batch_size"], [dict(one) for one in state_dict["trials"]]


class _Probe(Callback):
    """Measures the samples per second of the steps after the first."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._num_samples = 0
        self.samples_per_second = 0.0

    def on_train_batch_end(
        self, trainer: Run, module: nn.Module, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self._began is not None:
            self._num_samples += cast(Any, module).batch_size_of(batch)

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        synchronize_device(trainer.strategy.device)
        now = perf_counter()
        if self._began is None:
            self._began = now
        else:
            self.samples_per_second = self._num_samples / max(now - self._began, 1e-9)
