"""Tensors on a GPU that this machine does not have, and watches that refuse to wait for it, or to read too soon."""

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


class NoRaces(TorchDispatchMode):
    """Raises where a tensor is copied to the host, and can be read there before it has arrived."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_host = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
        if func.name() == "aten::_to_copy" and to_host and kwargs.get("non_blocking") and args[0].device.type == "cuda":
            raise AssertionError("the host may read what has not arrived")
        return func(*args, **kwargs)


@contextmanager
def fake_gpu(watch: type[TorchDispatchMode] = NoWaits) -> Iterator[torch.device]:
    """Let tensors be made on cuda:0, without memory; by default raise where something would wait for it."""
    with FakeTensorMode(allow_non_fake_inputs=True), watch():
        yield torch.device("cuda", 0)
