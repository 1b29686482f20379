"""HeldFolders: what a run keeps of its folders until it ends: their locks, and mirrors that copy them to a store."""

from __future__ import annotations

from contextlib import ExitStack

from ...common.storage import Mirror


class HeldFolders(ExitStack):
    """Callbacks that are called when the run ends, the last one first; and the mirrors of its folders."""

    def __init__(self) -> None:
        super().__init__()
        self.mirrors: list[Mirror] = []

    def wake_mirrors(self) -> None:
        """Have what was written so far copied soon: a run that continues from a checkpoint finds what came before."""
        for mirror in self.mirrors:
            mirror.wake()
