"""Finding: one thing on a machine that breaks or slows runs, with its remedy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """Something that is wrong."""

    check: str
    """The subject of the check."""
    text: str
    """What was found, with the value."""
    remedy: str
    """What to do, as a command where there is one."""
    stops: bool = True
    """Whether it would stop a run; otherwise it slows one down, or is likely to stop it later."""

    def describe(self) -> str:
        """Return it as two lines."""
        return f"{'error  ' if self.stops else 'warning'}  {self.check}: {self.text}\n         remedy: {self.remedy}"
