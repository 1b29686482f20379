"""Private names of torch's fake tensors, which have a shape and no memory, and of its process group without peers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from .operators import tree_leaves
from .versions import names_of_torch

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode


def make_fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors have a shape and no memory; real tensors are treated in the same way.

    Seen in torch 2.11 to 2.15.
    """
    with names_of_torch:
        from torch._subclasses.fake_tensor import FakeTensorMode
    return FakeTensorMode(allow_non_fake_inputs=True)


def make_fake_mode_beside_real() -> FakeTensorMode:
    """Return a `fake_mode` that computes normally if all tensors are real, such as the ranks of a DeviceMesh.

    Seen in torch 2.11 to 2.15.
    """
    with names_of_torch:
        from torch._subclasses.fake_tensor import FakeTensorMode

    class BesideReal(FakeTensorMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[object] = (), kwargs: Any = None) -> object:
            kinds = {type(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
            if kinds and kinds <= {torch.Tensor, torch.nn.Parameter}:
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    return BesideReal(allow_non_fake_inputs=True)


def is_without_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a shape but no memory, like those made in a `fake_mode` (torch 2.11 to 2.15)."""
    module: Any = sys.modules.get("torch._subclasses.fake_tensor")  # without it there are none
    return module is not None and isinstance(tensor, module.FakeTensor)


def leave_fake_mode() -> AbstractContextManager[object]:
    """Return a context in which new tensors have memory, also inside a `fake_mode` (torch 2.11 to 2.15)."""
    with names_of_torch:
        from torch._subclasses.fake_tensor import unset_fake_temporarily
    return unset_fake_temporarily()


def join_fake_group(rank: int, world_size: int) -> None:
    """Join a process group as one rank, without any other processes; its collectives return at once.

    Seen in torch 2.11 to 2.15.
    """
    import torch.distributed as dist

    with names_of_torch:
        from torch.distributed import HashStore  # type: ignore[attr-defined]  # as its documentation has it
        from torch.testing._internal.distributed import fake_pg  # noqa: F401 - it registers the backend
    dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=world_size)


def find_value_errors() -> tuple[type[Exception], ...]:
    """Return the errors that are raised when code reads the values of a tensor without memory (torch 2.11 to 2.15)."""
    with names_of_torch:
        from torch._subclasses import fake_tensor as fake

        values = fake.DataDependentOutputException, fake.DynamicOutputShapeException
        return (*values, fake.UnsupportedFakeTensorException, fake.UnsupportedOperatorException)
