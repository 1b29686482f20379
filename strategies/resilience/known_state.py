"""A look at the state of a rendezvous before torch unpickles it: whoever reaches the store could put anything there."""

from __future__ import annotations

import io
import pickle
from typing import Any, Final

from torch.distributed.elastic.rendezvous import RendezvousStateError

_TORCH: Final = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_KNOWN: Final = frozenset(
    (
        (_TORCH, "_RendezvousState"),
        (_TORCH, "_NodeDesc"),
        ("datetime", "datetime"),
        ("datetime", "timedelta"),
        ("datetime", "timezone"),
    )
)


def check_state(data: bytes) -> None:
    """Look through a pickled state without running what it names.

    Raises:
        RendezvousStateError: if it holds anything that torch does not put there.
    """
    try:
        _Unpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise RendezvousStateError(str(error)) from error


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it holds {module}.{name}")
        return super().find_class(module, name)
