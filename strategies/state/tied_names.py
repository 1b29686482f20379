"""Names in a module's state: those of tied weights, and those that a module writes but does not read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...common.errors import CheckpointError
from ..torch_internals.modules import reads_by_itself
from .dtensor import shard_like
from .lazy_tensor import StoredTensor


def with_tied_names(module: nn.Module, state: Mapping[str, object]) -> dict[str, object]:
    """Return a state dict with the names that it lacks of a tensor that it has under another name.

    Files of Hugging Face hold a tied head under the name of the embedding only.
    """
    own = module.state_dict(keep_vars=True)
    known = {id(own[name]): name for name in state if name in own}
    lacking = {name: known[id(tensor)] for name, tensor in own.items() if name not in state and id(tensor) in known}
    stored = {name: value for name, value in state.items() if isinstance(value, StoredTensor)}
    here = {**state, **{name: shard_like(value, own.get(name)) for name, value in stored.items()}}
    return {**here, **{name: here[other] for name, other in lacking.items()}}


def without_unread(module: nn.Module, state: Mapping[str, object]) -> dict[str, object]:
    """Return a state without the entries that parts of the module write, but could not read.

    Layers of bitsandbytes write how their weights are quantized beside them, and refuse to read it back: there it must
    be as the module was built, since the weights that are read mean nothing else.

    Raises:
        CheckpointError: if it is not.
    """
    own, parts = module.state_dict(keep_vars=True), dict(module.named_modules())
    registered = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    registered |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    unread = [
        name
        for name, value in own.items()
        if name in state and name not in registered and isinstance(value, Tensor) and not _is_read(name, parts)
    ]
    for name in unread:
        value = state[name]
        if not isinstance(value, Tensor) or not torch.equal(torch.as_tensor(value).cpu(), own[name].detach().cpu()):
            raise CheckpointError(
                f"{name} is quantized otherwise in the checkpoint than in this {type(module).__name__}; build it from "
                "the same base, quantized in the same way."
            )
    return {name: value for name, value in state.items() if name not in unread}


def _is_read(name: str, parts: Mapping[str, nn.Module]) -> bool:
    """Return whether a module may read an entry of this name: one that is its own, and has code that reads."""
    while name:
        name = name.rpartition(".")[0]
        if name in parts:
            break
    return reads_by_itself(parts[name])


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of tensors in a module's state, each with the first name of its tensor."""
    first: dict[int, str] = {}
    named = {name: first.setdefault(id(tensor), name) for name, tensor in module.state_dict(keep_vars=True).items()}
    return {name: other for name, other in named.items() if name != other}


def as_tied(module: nn.Module, state: Mapping[str, object]) -> dict[str, object]:
    """Return a module's state with one tensor under all names of a tied one, as in the module's own state dict."""
    ties = tied_names(module)
    return {name: state.get(ties.get(name, name), value) for name, value in state.items()}
