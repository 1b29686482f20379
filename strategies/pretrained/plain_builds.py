"""Plain builds: a model that ``from_pretrained`` of transformers reads as a whole, inside a deferred initialization."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

import torch

from ..module.deferred_init import DeferredInit


@contextmanager
def recording(deferred: DeferredInit) -> Iterator[None]:
    """Build modules inside without allocating memory, see `DeferredInit`; ``from_pretrained`` builds whole ones."""
    with _building_plainly(), deferred.recording():
        yield


@contextmanager
def _building_plainly() -> Iterator[None]:
    """Have ``from_pretrained`` of transformers work inside as outside of all modes, with values of its own.

    It builds on the meta device itself, looks at where tensors are, and then reads the values: none of this can be
    recorded. The random generator is left as it was, since the numbers that it draws are not in the record either.
    """
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.modeling_utils import PreTrainedModel

    original = vars(PreTrainedModel)["from_pretrained"]

    def from_pretrained(kind: Any, *args: Any, **kwargs: Any) -> Any:
        build = partial(copy_context().run, original.__func__, kind, *args, **kwargs)
        state = torch.get_rng_state()
        try:
            with ThreadPoolExecutor(1) as pool:  # a thread has no modes
                return pool.submit(build).result()
        finally:
            torch.set_rng_state(state)

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = original
