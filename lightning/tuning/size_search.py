"""Search for the batch size of loaders that the module or the data module builds again with each size."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch import nn

from ...callbacks import BatchSizeFinder, Callback
from ...callbacks.run import Run, Tunable
from ...common.console import say
from ...common.errors import ModuleError, RunError
from ...strategies.module.out_of_memory import is_out_of_memory, let_go_of
from ...trainer.loop.evaluate import evaluate_stage
from ...trainer.request import Request
from ...trainer.session.session import Session
from ...trainer.setup import load_evaluation_data, set_up_module
from ...trainer.tuning.attribute import set_attribute

_log = logging.getLogger(__name__)

Try = Callable[[int], None]
"""Runs some steps with this batch size."""


class LoaderSizes(BatchSizeFinder):
    """A `BatchSizeFinder` whose sizes are those of the loaders, and after which the fit ends.

    Its arguments are those of `BatchSizeFinder`.
    """

    def find(self, try_size: Try, num_samples: int | None) -> int:
        """Return the largest size with which `try_size` does not run out of memory, and at which a margin is left.

        Raises:
            RunError: if none fits.
        """
        most = self._max_val if num_samples is None else max(1, min(self._max_val, num_samples))
        self.trials = []
        size, best, _ = self.try_sizes(lambda size: self._takes(try_size, size), most)
        if not best:
            raise RunError(
                f"scale_batch_size found no size that fits: {size} samples did not fit into memory after "
                f"{len(self.trials)} trials; raise max_trials, or lower init_val."
            )
        if num_samples is not None and best >= num_samples:
            _log.info("The batch size %d is greater or equal than the length of your dataset.", best)
        return max(1, int(best * (1 - self._margin))) if self._mode == "binsearch" else best

    def _takes(self, try_size: Try, size: int) -> bool:
        if self.trials and self.trials[-1]["fits"]:
            _log.info("Batch size %d succeeded, trying batch size %d", self.trials[-1]["size"], size)
        try:
            try_size(size)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or size == 1:
                raise
            let_go_of(error)
            fits = False
        else:
            fits = True
        gc.collect()
        self.trials.append({"size": size, "fits": fits, "samples_per_second": 0.0})
        say(f"A batch size of {size} {'fits' if fits else 'does not fit'} into memory.")
        return fits

    def check_attribute(self, found: str | None, module: nn.Module) -> None:
        """Raise a `ModuleError` unless the module or the data module has an attribute for the size."""
        if found is None:
            raise ModuleError(
                f"scale_batch_size sets {self._batch_arg_name} in {type(module).__name__}, its data module or the "
                "hparams of either, found none; set one in __init__ and build the loaders with it, or name another by "
                "batch_arg_name=..."
            )

    def take(self, size: int, session: Session) -> None:
        """Set the attribute that the loaders are built with."""
        set_attribute((session.module, session.datamodule), self._batch_arg_name, size)
        session.found[self._batch_arg_name] = size

    @property
    def steps_per_trial(self) -> int:
        """The number of steps with each size."""
        return self._steps_per_trial

    @property
    def first_size(self) -> int:
        """The first size to try."""
        return min(self._init_val, self._max_val)

    # --- in a fit ----------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Search, and end the fit."""
        session: Session = trainer.session  # type: ignore[attr-defined]

        def load(size: int) -> None:
            self.take(size, session)
            assert session.train_data is not None and session.reload is not None
            session.train_data.close()
            session.reload("train")

        def try_size(size: int) -> None:
            load(size)
            cast(Tunable, trainer).try_steps(Callback(), self._steps_per_trial)

        data = session.train_data
        self.optimal_batch_size = self.find(try_size, _num_samples(data.source if data is not None else None))
        load(self.optimal_batch_size)
        end_fit(trainer)


def end_fit(trainer: Run) -> None:
    """End a fit before its first step."""
    session: Session = trainer.session  # type: ignore[attr-defined]
    session.settings = replace(session.settings, max_epochs=0, min_epochs=0, min_steps=0)


def try_evaluations(session: Session, request: Request, *, finder: LoaderSizes) -> None:
    """Search in an evaluation, with a few batches of each size."""
    stage: Any = request.task
    finder.take(finder.first_size, session)
    load_evaluation_data(session, stage, None)
    set_up_module(session)
    session.is_built = True
    data = session.evaluation_data
    assert data is not None

    def try_size(size: int) -> None:
        finder.take(size, session)
        load_evaluation_data(session, stage, None)
        evaluate_stage(session, stage, finder.steps_per_trial)

    finder.optimal_batch_size = finder.find(try_size, _num_samples(data.source))
    finder.take(finder.optimal_batch_size, session)
    load_evaluation_data(session, stage, None)


def _num_samples(source: Any) -> int | None:
    """Return the number of samples behind a loader; None if it does not tell."""
    try:
        return len(source.dataset)
    except (AttributeError, TypeError):
        return None
