"""Tensors on a GPU that this machine does not have, as shapes without values, and a check that nothing waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NoWaits(TorchDispatchMode):
    """Raises if the host would read from the device, or copy to it from memory that is not pinned."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        kinds = {tensor.device.type for tensor in tensors}
        if name == "aten::_local_scalar_dense" and "cuda" in kinds:
            raise AssertionError("the host reads a number from the device")
        if name.startswith(("aten::_to_copy", "aten::copy_")) and "cuda" in kinds:
            target = kwargs.get("device")
            crosses = len(kinds) > 1 or (target is not None and torch.device(target).type not in kinds)
            if crosses and not kwargs.get("non_blocking") and True not in args[2:]:
                raise AssertionError(f"{name} between the host and the device waits for it")
        return func(*args, **kwargs)


@contextmanager
def fake_gpu() -> Iterator[torch.device]:
    """Allow tensors on cuda:0, without memory, inside the block, and raise if something would wait for the device."""
    with FakeTensorMode(allow_non_fake_inputs=True), NoWaits():
        yield torch.device("cuda", 0)
