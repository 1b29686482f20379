"""Lightning's names over Echelon's, and `stand_in` for libraries that import Lightning. Imports trainer and below.

``import echelon.lightning as L`` in place of ``import lightning as L`` runs a program unchanged; a name without a
counterpart raises when it is used, and says what to use instead.
"""

from __future__ import annotations

from typing import Any

if __package__ == "lightning":  # and not echelon.lightning: Python searches the root of a checkout, in which it runs
    from .namesake import import_namesake

    import_namesake()
else:
    from ..callbacks import Callback
    from .extras.machine import seed_everything
    from .module import LightningDataModule, LightningModule
    from .stand_in import module_of, stand_in
    from .trainer import LightningTrainer as Trainer

__all__ = [
    "Callback",
    "LightningDataModule",
    "LightningModule",
    "Trainer",
    "seed_everything",
    "stand_in",
]


def __getattr__(name: str) -> Any:
    """Return any other Lightning name, or one of its modules, such as ``callbacks`` and ``pytorch``."""
    return getattr(module_of("lightning", __name__), name)
