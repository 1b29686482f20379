"""SharedStore: where agents and workers keep what outlives rounds."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

RUN_FOLDER: Final = "run_folder"
"""Where workers keep, as JSON, the folder of their run; for the agents."""

_PATIENCE: Final = timedelta(seconds=30)


@dataclass(frozen=True)
class SharedStore:
    """The address of a store, and the prefix of a run in it."""

    host: str
    port: int
    prefix: str

    def connect(self) -> Any:
        """Return a connection to it."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # as its documentation has it

        store = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=_PATIENCE)
        return PrefixStore(self.prefix, store)
