"""NewSteps: whether `on_train_step_end` follows a step, or only the end of an epoch that reading has told."""

from __future__ import annotations

from ..run import Run


class NewSteps:
    """Counts the steps of a run once: where data has no length, the hook comes once more after an epoch has ended."""

    def __init__(self) -> None:
        self._samples_seen = 0

    def begin(self, trainer: Run) -> None:
        """Count from here on."""
        self._samples_seen = trainer.samples_seen

    def has_come(self, trainer: Run) -> bool:
        """Return whether a step was made since the last call."""
        before, self._samples_seen = self._samples_seen, trainer.samples_seen
        return self._samples_seen != before
