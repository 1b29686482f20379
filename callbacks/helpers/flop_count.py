"""Count of FLOPs, with compiled code run as it is written, since the counter cannot see into it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...strategies.torch_internals.compiler import is_compiler_imported


@contextmanager
def counted_flops() -> Iterator[Any]:
    """Count FLOPs in a ``torch.utils.flop_counter.FlopCounterMode``, with compiled functions run as they were written.

    A function that torch 2.11 first sees inside such a mode would never be compiled afterwards.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    if not is_compiler_imported():  # nothing has been compiled, and the import takes a second
        with counter:
            yield counter
        return
    with torch.compiler.set_stance("force_eager"), counter:
        yield counter
