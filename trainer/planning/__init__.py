"""Planning of a run: its profile, the layouts that are possible, and the one to choose. Imports resume and below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_names import lazy_names

if TYPE_CHECKING:
    from .auto import choose_layout as choose_layout
    from .machine import memory_of_host as memory_of_host
    from .out_of_memory import comment_on_memory as comment_on_memory
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {"auto": ("choose_layout",), "machine": ("memory_of_host",), "out_of_memory": ("comment_on_memory",)},
    )
