"""Names of tied weights: a state has one tensor under all of them, and is loaded if it was saved under one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from .dtensor import shard_like
from .lazy_tensor import StoredTensor


def with_tied_names(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with the names that it lacks of a tensor that it has under another name.

    Files of Hugging Face hold a tied head under the name of the embedding only.
    """
    own = module.state_dict(keep_vars=True)
    known = {id(own[name]): name for name in state if name in own}
    lacking = {name: known[id(tensor)] for name, tensor in own.items() if name not in state and id(tensor) in known}
    stored = {name: value for name, value in state.items() if isinstance(value, StoredTensor)}
    here = {**state, **{name: shard_like(value, own.get(name)) for name, value in stored.items()}}
    return {**here, **{name: here[other] for name, other in lacking.items()}}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the further names of tensors in a module's state, each with the first name of its tensor."""
    first: dict[int, str] = {}
    named = {name: first.setdefault(id(tensor), name) for name, tensor in module.state_dict(keep_vars=True).items()}
    return {name: other for name, other in named.items() if name != other}


def as_tied(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's state with one tensor under all names of a tied one, as in the module's own state dict."""
    ties = tied_names(module)
    return {name: state.get(ties.get(name, name), value) for name, value in state.items()}
