"""Optimizer state by parameter name instead of position, so that every strategy can load it."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.nested import map_tensors
from ..errors import CheckpointError
from .schema import NUMBER, TEXT, check, shown

_SCHEMA: Final = {"state": {TEXT: dict}, "param_groups": [{"params": [TEXT]}]}


def state_by_name(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with each parameter's position replaced by its name in `module`.

    A parameter that does not belong to the module is called ``unnamed.<position>``.
    """
    state = optimizer.state_dict()
    names = parameter_names(optimizer, module)
    return {
        "state": {names[position]: value for position, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[position] for position in group["params"]]} for group in state["param_groups"]
        ],
    }


def state_by_position(optimizer: Optimizer, module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state by name in the form of ``optimizer.load_state_dict``; the inverse of `state_by_name`.

    Raises:
        CheckpointError: if the state is from other parameters, another number of groups, or another optimizer.
    """
    check(state, _SCHEMA, "The optimizer state")
    names = parameter_names(optimizer, module)
    saved_names = [name for group in state["param_groups"] for name in group["params"]]
    if set(saved_names) != set(names):
        missing, unexpected = sorted(set(names) - set(saved_names)), sorted(set(saved_names) - set(names))
        raise CheckpointError(
            f"The optimizer state must have this optimizer's parameters, got one without {missing[:5]} and with "
            f"{unexpected[:5]}; load the weights only (echelon.load_weights), or configure the optimizer as it was "
            "saved."
        )
    here = optimizer.state_dict()["param_groups"]
    saved = state["param_groups"]
    if len(saved) != len(here):
        raise CheckpointError(
            f"The optimizer state must have {len(here)} parameter groups as this optimizer has, got {len(saved)}; "
            "configure the optimizer as it was saved."
        )
    _check_kind(optimizer, saved)
    _check_settings(optimizer, saved)
    _check_entries(state["state"], names)
    position = {name: index for index, name in enumerate(names)}
    return {
        # cloned, since tensors of a checkpoint may be views of its file
        "state": {position[name]: map_tensors(Tensor.clone, dict(value)) for name, value in state["state"].items()},
        "param_groups": [{**new, **old, "params": new["params"]} for old, new in zip(saved, here, strict=True)],
    }


def _check_kind(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Reject the state of another kind of optimizer, which would cause a KeyError in the next step."""
    for group, here in zip(saved, optimizer.param_groups, strict=True):
        # loading fills in settings that newer versions of torch have added; only both together mean another kind
        lacking, unknown = sorted(optimizer.defaults.keys() - group.keys()), sorted(group.keys() - here.keys())
        if lacking and unknown:
            raise CheckpointError(
                f"The optimizer is {type(optimizer).__name__} with {lacking}, the saved one had {unknown} instead; "
                "configure the optimizer as it was saved, or load the weights only (echelon.load_weights)."
            )


def _check_settings(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Reject settings that are not numbers where this optimizer has numbers."""
    for index, (group, here) in enumerate(zip(saved, optimizer.param_groups, strict=True)):
        for name in group.keys() & here.keys() - {"params"}:
            _check_setting(group[name], here[name], f"{name} of group {index} in the optimizer state")


def _check_setting(saved: Any, here: Any, place: str) -> None:
    if isinstance(here, tuple):
        check(saved, [(NUMBER, Tensor)], place)
        if len(saved) != len(here):
            raise CheckpointError(f"{place} must have {len(here)} numbers, got {len(saved)}; use another checkpoint.")
    elif isinstance(here, int | float) and not isinstance(here, bool):
        check(saved, (NUMBER, Tensor), place)


def _check_entries(state: Mapping[str, Any], names: Sequence[str]) -> None:
    """Reject entries of unknown parameters, and entries of another type than those of the other parameters."""
    kinds: dict[str, bool] = {}
    for parameter, entries in state.items():
        if parameter not in names:
            raise CheckpointError(
                f"The optimizer state must be of {shown(names)}, got an entry of {shown(parameter)}; use another "
                "checkpoint."
            )
        for name, value in entries.items():
            is_tensor = isinstance(value, Tensor)
            if kinds.setdefault(name, is_tensor) is not is_tensor and value is not None:
                raise CheckpointError(
                    f"{shown(name)} of {parameter} in the optimizer state must be a tensor for all parameters or for "
                    f"none, got {shown(value)}; use another checkpoint."
                )


def parameter_names(optimizer: Optimizer, module: nn.Module) -> list[str]:
    """Return the names in `module` of an optimizer's parameters, in the optimizer's order."""
    known: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [known.get(parameter, f"unnamed.{index}") for index, parameter in enumerate(parameters)]


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's attributes, except its groups and state, from which `remake` makes another one.

    The scheduler's wrapper of its step and its hooks are left out, since they belong to the user's object.
    """
    left_out = ("step", "state", "param_groups")
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in left_out and not name.startswith("_optimizer_")
    }


def remake(kind: type[Optimizer], attributes: Mapping[str, Any], groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer of this class with these groups, without state.

    It is made the way unpickling does, since the arguments of a constructor may differ from the groups' defaults.
    """
    optimizer: Optimizer = object.__new__(kind)
    optimizer.__setstate__({**attributes, "state": defaultdict(dict), "param_groups": groups})
    return optimizer


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer evaluates the loss itself, several times per step, as LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class Sharded(dict[str, Any]):
    """A mapping in a strategy's state whose entries are distributed over the ranks; it holds those that this rank owns.

    Other ranks have other entries, under other names, and none has all: ``{"state": Sharded(own), "param_groups":
    [...]}`` on every rank, even if ``own`` is empty. A checkpoint holds the entries of all ranks, each written by its
    owner; they are loaded as one plain dict. Everything outside of it is equal on all ranks and written by rank 0. A
    DTensor does not need such a mark: it knows which shard of it is here. If several ranks have the same entries, with
    DTensors inside, one of them is the owner.
    """

    is_owner: bool = True
    """Whether this rank writes the names of the entries and everything in them that is not a DTensor."""
    sources: Collection[int] = ()
    """The ranks that write what this one holds, besides itself and those that hold the same shards."""


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """A tensor in a module's state that other ranks hold and write under the same name."""

    shape: tuple[int, ...]
    dtype: torch.dtype
