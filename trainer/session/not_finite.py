"""FirstNotFinite: the first value of a fit that was read as NaN or infinite, with a warning when it is."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Final

REMEDY: Final = "add NaNGuard() to the callbacks to stop at the first loss or gradient that is not finite."


class FirstNotFinite:
    """Watches the values of a fit where they are read anyway: for the loggers, and the loss at logged steps.

    Args:
        skips_steps: whether steps with infinite gradients are skipped, as with ``16-mixed``: what is logged of such a
            step may be infinite, and only what stays so counts.
    """

    __slots__ = ("_skips_steps", "_suspects", "found")

    def __init__(self, *, skips_steps: bool) -> None:
        self._skips_steps = skips_steps
        self._suspects: set[str] = set()
        self.found = ""
        """When what was not finite; empty if everything was."""

    def look(self, numbers: Mapping[str, float], step: int) -> None:
        """Warn of the first of these values, logged at a step, that is not finite, if it is the first of all."""
        if self.found or (all(map(math.isfinite, numbers.values())) and not self._suspects):
            return
        bad = [name for name, value in numbers.items() if not math.isfinite(value)]
        counting = [name for name in bad if not self._skips_steps or name in self._suspects]
        self._suspects = self._suspects.difference(numbers).union(bad)
        if counting:
            self.note(repr(counting[0]), numbers[counting[0]], step)

    def note(self, what: str, value: float, step: int) -> None:
        """Warn of a value that is not finite, unless another one was before it."""
        if self.found:
            return
        self.found = f"at global_step {step}, in {what[:1].lower()}{what[1:]}"
        warnings.warn(f"{what} is {value} at global_step {step}, and training goes on; {REMEDY}", stacklevel=2)
