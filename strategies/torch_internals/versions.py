"""Versions of torch that have the private names of this room, and an error that says so where one is gone."""

from __future__ import annotations

from typing import Final

import torch

from ...common.errors import EchelonError

SEEN: Final = "2.11.0, 2.14.1 and 2.15.0"
"""The versions of torch that have all these names; `make test-versions` runs the core of the tests on them."""


class _NamesOfTorch:
    """Raises an error that names the supported versions of torch if a private name is gone from this one."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, ImportError | AttributeError):
            raise EchelonError(
                f"A private name that Echelon needs is missing in torch {torch.__version__} ({error}); Echelon was "
                f"tested with torch {SEEN}: install one of them, or a newer Echelon."
            ) from error


names_of_torch: Final = _NamesOfTorch()
