"""Count of FLOPs, of code that runs as it is written: what torch.compile has made of it would not be seen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def counted_flops() -> Iterator[Any]:
    """Count FLOPs in a ``torch.utils.flop_counter.FlopCounterMode``, with compiled functions run as they were written.

    A function that torch 2.11 meets first inside such a mode would never be compiled afterwards.
    """
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled, and the import takes a second
        with counter:
            yield counter
        return
    with torch.compiler.set_stance("force_eager"), counter:
        yield counter
