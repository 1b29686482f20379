"""Module whose import lets Echelon stand in for Lightning: the workers of a run import it before the user's modules."""

from __future__ import annotations

from .stand_in import stand_in

stand_in()
