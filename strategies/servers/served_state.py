"""ServedState: the state of an optimizer in a trainer, while servers hold that of some parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import ModuleError


class ServedState(defaultdict[Tensor, Any]):
    """The state of a user's optimizer while servers hold that of some parameters, which it lacks.

    Args:
        own: that of the others.
        served: the names of the parameters whose state is on the servers.
    """

    def __init__(self, own: Mapping[Tensor, Any], served: Mapping[Tensor, str]) -> None:
        super().__init__(dict, own)
        self._served = served
        self.is_cleared = False
        """Whether a hook has reset the state of all parameters."""

    def __missing__(self, key: Tensor) -> Any:
        """Return an empty state of a parameter that has none yet, as every optimizer's does.

        Raises:
            ModuleError: for one that is on a server.
        """
        if key in self._served:
            raise ModuleError(
                f"strategy='ps' holds the optimizer's state of {self._served[key]} on a server, where hooks cannot "
                "read or edit it, got state[...] for it; reset the state of all parameters by state.clear(), or use "
                "strategy='ddp'."
            )
        return super().__missing__(key)

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict, dict(self))

    def clear(self) -> None:
        """Reset the state of all parameters: also that which servers hold, before the next push."""
        self.is_cleared = True
        super().clear()
