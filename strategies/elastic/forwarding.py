"""ForwardingStrategy: a strategy that does everything as another one does."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from ..strategy import Strategy


class ForwardingStrategy(Strategy):
    """Contains a strategy and forwards the whole seam to it; a subclass overrides what is to be otherwise.

    What the seam gets in the future is forwarded, too: each member is a property that reads the inner strategy's. That
    happens in C, and what a step calls is bound once a run, to the inner strategy itself.
    """

    def __init__(self, inner: Strategy) -> None:
        # not Strategy's own: what it sets lies in the inner strategy
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that is no part of the seam: the inner strategy's."""
        if name == "inner":  # a strategy that is just being unpickled has none
            raise AttributeError(name)
        return getattr(self.inner, name)

    def run(self, step_name: str, *args: Any) -> Any:
        return self.inner.run(step_name, *args)


for _name in vars(Strategy):
    if not _name.startswith("_") and _name not in vars(ForwardingStrategy):
        setattr(ForwardingStrategy, _name, property(attrgetter(f"inner.{_name}")))
