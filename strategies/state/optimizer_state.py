"""Optimizer state by parameter name instead of position, so that every strategy can load it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..distributed.nested import map_tensors
from ..errors import CheckpointError


def state_by_name(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` with each parameter's position replaced by its name in `module`.

    A parameter that is not the module's is called ``unnamed.<position>``.
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
    """Return a state by name as ``optimizer.load_state_dict`` takes it; the inverse of `state_by_name`.

    Raises:
        CheckpointError: if the state is of other parameters, of another number of groups, or of another optimizer.
    """
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
    position = {name: index for index, name in enumerate(names)}
    return {
        # cloned, since tensors of a checkpoint may be views of its file
        "state": {position[name]: map_tensors(Tensor.clone, dict(value)) for name, value in state["state"].items()},
        "param_groups": [{**old, "params": new["params"]} for old, new in zip(saved, here, strict=True)],
    }


def _check_kind(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse the state of another kind of optimizer, which would end in a KeyError at the next step."""
    for group, here in zip(saved, optimizer.param_groups, strict=True):
        # settings that newer versions of torch have added are filled in as it loads; only both tell another kind
        lacking, unknown = sorted(optimizer.defaults.keys() - group.keys()), sorted(group.keys() - here.keys())
        if lacking and unknown:
            raise CheckpointError(
                f"The optimizer is {type(optimizer).__name__} with {lacking}, the saved one had {unknown} instead; "
                "configure the optimizer as it was saved, or load the weights only (echelon.load_weights)."
            )


def parameter_names(optimizer: Optimizer, module: nn.Module) -> list[str]:
    """Return the names in `module` of an optimizer's parameters, in the order of the optimizer."""
    known: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [known.get(parameter, f"unnamed.{index}") for index, parameter in enumerate(parameters)]


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer evaluates the loss itself, several times a step: LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class Sharded(dict[str, Any]):
    """A mapping in the state of a strategy whose entries are spread over the ranks: these are what this rank owns.

    Every other rank has others, under other names, and none has all: ``{"state": Sharded(own), "param_groups": [...]}``
    on every rank, if need be with an empty one. A checkpoint holds the entries of all ranks, each written by its owner;
    they are loaded as one plain dict. What stands outside of it is equal on all ranks and written by rank 0. A DTensor
    needs no such mark: it knows which shard of it is here.
    """
