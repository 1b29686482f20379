"""Trials: the part of the trainer that callbacks use to search for a setting (`callbacks.run.Tunable`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

from ..callbacks.callback import Callback
from . import tuning
from .data.seed import capture_rng, restore_rng
from .request import Request
from .runner import Runner, Work
from .session.session import Session

_KEPT: Final = ("settings", "given", "loggers", "_callbacks", "state", "origin", "current", "_has_fitted")
"""What a run changes in its `Runner`."""
_SILENT: Final[Mapping[str, object]] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Trials:
    """Steps of the current fit that are undone, and the settings that they find."""

    _runner: Runner

    def run_aside(
        self, work: Work, request: Request, choose: Callable[[list[Callback]], list[Callback]] = lambda _: []
    ) -> Any:
        """Do the work of a search between two runs, with no logs or checkpoints, and leave the trainer as it was.

        Args:
            work: what is done in the session of the run.
            request: the run.
            choose: returns the callbacks that take part, given the trainer's own.
        """
        parts = vars(self._runner)
        before, rng = {name: parts[name] for name in _KEPT}, capture_rng()
        parts.update(settings=replace(before["settings"], **_SILENT), loggers=[], current=None)
        parts["_callbacks"] = choose(before["_callbacks"])
        try:
            return self._runner.execute(work, request)
        finally:
            ran = self._runner.current
            parts.update(before)
            restore_rng(rng)
            if before["current"] is None and ran is not None:  # its loaders can be looked at, as in Lightning
                self._runner.current, ran.callbacks = ran, before["_callbacks"]

    def try_steps(
        self,
        callback: Callback,
        num_steps: int,
        *,
        micro_batch_size: int | None = None,
        num_micro_batches: int | None = None,
    ) -> None:
        """Train some steps with this callback only, then restore everything as it was. Collective."""
        tuning.trial.try_steps(
            self._runner.session,
            callback,
            num_steps,
            self._as_current,
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
        )

    @contextmanager
    def _as_current(self, session: Session) -> Iterator[None]:
        runner = self._runner
        before = runner.current, runner.state
        runner.current, runner.state = session, session.state
        try:
            yield
        finally:
            runner.current, runner.state = before

    def configure_again(self) -> None:
        """Give optimizers and schedulers the settings that ``configure_optimizers`` returns now."""
        tuning.configure_again.configure_again(self._runner.session)

    def find_attribute(self, *names: str) -> str | None:
        """Return the first of these names that the module, the data module, or the ``hparams`` of either has."""
        session = self._runner.session
        return tuning.attribute.find_attribute((session.module, session.datamodule), names)

    def set_attribute(self, name: str, value: float, *, is_saved: bool = True) -> None:
        """Set an attribute of the module, the data module, or their ``hparams``, also in the caller's objects."""
        session = self._runner.session
        tuning.attribute.set_attribute((session.module, session.datamodule), name, value, is_saved=is_saved)
        session.found[name] = value

    @property
    def samples_per_step(self) -> int | None:
        """The samples per optimizer step in the current fit; None if the data does not tell."""
        data = self._runner.session.train_data
        return data.global_batch_size if data is not None else None

    def set_micro_batch_size(self, size: int) -> None:
        """Cut the steps of the current fit into micro-batches of this size; the steps stay the same."""
        session = self._runner.session
        data = session.train_data
        assert data is not None
        data.cut_into(size)
        session.progress.accumulate_grad_batches = data.accumulate
        session.state.go_to(data.batches_done())
