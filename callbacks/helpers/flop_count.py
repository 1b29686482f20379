"""Count of FLOPs, with compiled code run as it is written, since the counter cannot see into it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def counted_flops() -> Iterator[Any]:
    """Count FLOPs in a ``torch.utils.flop_counter.FlopCounterMode``, with compiled functions run as they were written.

    A function that torch 2.11 first sees inside such a mode would never be compiled afterwards.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled, and the import takes a second
        with counter:
            yield counter
        return
    with torch.compiler.set_stance("force_eager"), counter:
        yield counter
