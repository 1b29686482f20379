"""Steps that are tried and undone, and the attributes that finders set. Imports resume and below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_names import lazy_names

if TYPE_CHECKING:
    from . import attribute as attribute
    from . import configure_again as configure_again
    from . import trial as trial
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {"": ("attribute", "configure_again", "trial")})
