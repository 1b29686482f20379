"""Optimizer state by parameter name instead of position, so that every strategy can load it."""

from __future__ import annotations

import inspect
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.errors import CheckpointError
from ..distributed.collectives import Collectives
from ..distributed.nested import map_tensors, named_leaves, rebuild_mapping
from .dtensor import is_dtensor, is_wrapper, own_copy_of
from .optimizer_groups import UNNAMED, Sources, match_groups, taken_over
from .schema import TEXT, check_schema, format_as_line

_SCHEMA: Final = {"state": {TEXT: dict}, "param_groups": [{"params": [TEXT]}]}
_DTYPES: Final = {TEXT: torch.dtype}


def state_by_name(optimizer: Optimizer, module: nn.Module) -> dict[str, object]:
    """Return ``optimizer.state_dict()`` with each parameter's position replaced by its name in `module`.

    ``dtypes`` has the dtypes of the parameters, ``shared`` the state that belongs to no parameter, and ``others`` what
    the optimizer's class returns beside ``state`` and ``param_groups``, if there is any.

    Raises:
        CheckpointError: for parameters that do not belong to the module, whose values no checkpoint would hold.
    """
    state = optimizer.state_dict()
    names, foreign = parameter_names(optimizer, module), shapes_of_others(optimizer, module)
    if foreign:
        raise CheckpointError(
            f"{len(foreign)} of {len(names)} parameters of {type(optimizer).__name__} are not the module's, of shapes "
            f"{foreign[:3]}, and a checkpoint does not hold them; make them, or the module that has them, attributes "
            "of self, in a ModuleList or ParameterList instead of a list."
        )
    entries, groups = state.get("state", {}), state.get("param_groups", _groups_by_position(optimizer))
    shared = {key: value for key, value in entries.items() if type(key) is not int}
    others = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    return {
        "state": {names[position]: value for position, value in entries.items() if position not in shared},
        "param_groups": [{**group, "params": [names[position] for position in group["params"]]} for group in groups],
        "dtypes": {name: p.dtype for name, p in zip(names, optimizer_parameters(optimizer), strict=True)},
        **({"shared": shared} if shared else {}),
        **({"others": others} if others else {}),
    }


def _groups_by_position(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the groups of an optimizer with positions of parameters, and without settings."""
    positions = count()
    return [{"params": [next(positions) for _ in group["params"]]} for group in optimizer.param_groups]


def load_by_name(optimizer: Optimizer, module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state by name, with the settings of its groups, into an optimizer; the inverse of `state_by_name`.

    Groups are matched by their parameters. State in the dtype of its parameter follows that dtype; any other state
    keeps the dtype in which it was saved, which ``optimizer.load_state_dict`` would convert.

    Raises:
        CheckpointError: if the state is from other parameters, other groups that cannot be matched, or another
            optimizer.
    """
    by_position = _state_by_position(optimizer, module, state)
    optimizer.load_state_dict(by_position)
    dtypes, names = state.get("dtypes", {}), parameter_names(optimizer, module)
    for position, parameter in enumerate(optimizer_parameters(optimizer)):
        saved, loaded = by_position["state"].get(position, {}), optimizer.state.get(parameter)
        if isinstance(loaded, dict):
            changed = dtypes.get(names[position], parameter.dtype), parameter.dtype
            for key in saved.keys() & loaded.keys() - {"step"}:  # torch has a rule of its own for this name
                loaded[key] = _as_saved(loaded[key], saved[key], changed)


def _as_saved(loaded: Any, saved: Any, changed: tuple[torch.dtype, torch.dtype]) -> object:
    """Return a value of a parameter's state without the conversions of ``optimizer.load_state_dict``.

    Args:
        loaded: The value as the optimizer has it now.
        saved: As it was saved.
        changed: The dtypes of the parameter then and now.
    """
    before, now = changed
    if isinstance(saved, Tensor):
        wanted = now if saved.dtype == before else saved.dtype
        is_converted = isinstance(loaded, Tensor) and loaded.shape == saved.shape and loaded.dtype == now != wanted
        return saved.to(loaded.device, wanted) if is_converted else loaded
    if isinstance(saved, dict) and isinstance(loaded, dict) and saved.keys() == loaded.keys():
        own = {k: loaded[k] if k == "step" else _as_saved(loaded[k], saved[k], changed) for k in saved}
        return rebuild_mapping(saved, own)
    if type(saved) in (list, tuple, deque) and type(loaded) is type(saved):
        items = [_as_saved(one, other, changed) for one, other in zip(loaded, saved, strict=True)]
        return deque(items, saved.maxlen) if type(saved) is deque else type(saved)(items)
    return saved if isinstance(saved, str | set | frozenset) else loaded  # torch makes a text of any other text


def _state_by_position(optimizer: Optimizer, module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state by name in the form of ``optimizer.load_state_dict``."""
    check_schema(state, _SCHEMA, "The optimizer state")
    check_schema(state.get("dtypes", {}), _DTYPES, "dtypes of the optimizer state")
    check_schema(state.get("shared", {}), dict, "The optimizer state's shared part")
    check_schema(state.get("others", {}), dict, "The optimizer state's other parts")
    names = parameter_names(optimizer, module)
    saved_names = {name for group in state["param_groups"] for name in group["params"]}
    if saved_names != set(names):
        missing, unexpected = sorted(set(names) - saved_names), sorted(saved_names - set(names))
        raise CheckpointError(
            f"The optimizer state must have this optimizer's parameters, got one without {missing[:5]} and with "
            f"{unexpected[:5]}; load the weights only (echelon.load_weights), or configure the optimizer as it was "
            "saved."
        )
    others = map_tensors(own_copy_of, dict(state.get("others", {})))
    own = optimizer.state_dict()
    if "param_groups" not in own:  # as of a class that wraps another optimizer
        return {"state": {}, "param_groups": [], **others}
    here, saved = own["param_groups"], state["param_groups"]
    groups = taken_over(optimizer, here, saved, group_sources(optimizer, module, state))
    _check_entries(state["state"], names)
    position = {name: index for index, name in enumerate(names)}
    entries = {position[name]: value for name, value in state["state"].items()} | dict(state.get("shared", {}))
    return {
        # cloned, since tensors of a checkpoint may be views of its file
        "state": map_tensors(own_copy_of, entries),
        "param_groups": groups,
        **others,
    }


def group_sources(optimizer: Optimizer, module: nn.Module, state: Mapping[str, Any]) -> Sources:
    """Return the group of a saved state from which each group of an optimizer takes its settings.

    Raises:
        CheckpointError: for a group with parameters of saved groups that had different settings.
    """
    names = iter(parameter_names(optimizer, module))
    return match_groups(
        state["param_groups"], [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    )


def match_optimizers(
    optimizers: Sequence[Optimizer], module: nn.Module, states: Sequence[Mapping[str, Any]]
) -> list[int]:
    """Return the index of the saved state of each optimizer, by its parameters; without a match, keep their order."""
    for state in states:
        check_schema(state, _SCHEMA, "The optimizer state")
    saved = [{name for group in state["param_groups"] for name in group["params"]} for state in states]
    left, order = list(range(len(states))), []
    for index, optimizer in enumerate(optimizers):
        names = set(parameter_names(optimizer, module))
        found = [other for other in left if saved[other] == names]
        if not found:
            return list(range(len(states)))
        order.append(index if index in found else found[0])
        left.remove(order[-1])
    return order


def _check_entries(state: Mapping[str, Any], names: Sequence[str]) -> None:
    """Reject entries of unknown parameters, and entries of another type than those of the other parameters."""
    kinds: dict[str, bool] = {}
    for parameter, entries in state.items():
        if parameter not in names:
            raise CheckpointError(
                f"The optimizer state must be of {format_as_line(names)}, got an entry of {format_as_line(parameter)}; "
                "use another checkpoint."
            )
        for name, value in entries.items():
            is_tensor = isinstance(value, Tensor)
            if kinds.setdefault(name, is_tensor) is not is_tensor and value is not None:
                raise CheckpointError(
                    f"{format_as_line(name)} of {parameter} in the optimizer state must be a tensor for all parameters "
                    f"or for none, got {format_as_line(value)}; use another checkpoint."
                )


def parameter_names(optimizer: Optimizer, module: nn.Module) -> list[str]:
    """Return the names in `module` of an optimizer's parameters, in the optimizer's order; ``unnamed.0`` of others."""
    known: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    return [known.get(p, f"{UNNAMED}{index}") for index, p in enumerate(optimizer_parameters(optimizer))]


def shapes_of_others(optimizer: Optimizer, module: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes of the trained parameters of an optimizer that are not the module's."""
    own = set(module.parameters())
    return [tuple(p.shape) for p in optimizer_parameters(optimizer) if p not in own and p.requires_grad]


def optimizer_parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def attributes_of(optimizer: Optimizer) -> dict[str, object]:
    """Return an optimizer's attributes, except its groups and state, from which `remake_optimizer` makes another one.

    The scheduler's wrapper of its step and its hooks are left out, since they belong to the user's object.
    """
    left_out = ("step", "state", "param_groups")
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in left_out and not name.startswith("_optimizer_")
    }


def remake_optimizer(
    kind: type[Optimizer], attributes: Mapping[str, object], groups: list[dict[str, object]]
) -> Optimizer:
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
class BlockByBlock:
    """A DTensor in an optimizer's state whose shards wrap others on some ranks only: each is written as it is."""

    tensor: Tensor


def agree_on_wrapped(state: Mapping[str, object], collectives: Collectives) -> dict[str, object]:
    """Return an optimizer's state whose DTensors are marked if their shards wrap others on some ranks only. Collective.

    torchao quantizes a shard only if it has enough elements, and a number of them that its blocks divide.
    """
    sharded = {name: is_wrapper(leaf) for name, leaf in named_leaves(dict(state)) if is_dtensor(leaf)}
    if not collectives.all_reduce(float(any(sharded.values())), "max"):
        return dict(state)
    ranks = collectives.all_gather_object(sharded)
    mixed = {name for one in ranks for name in one if len({rank[name] for rank in ranks if name in rank}) > 1}
    names = (name for name, _ in named_leaves(dict(state)))

    def mark(leaf: Any) -> Any:
        return BlockByBlock(leaf) if next(names) in mixed else leaf

    return dict(map_tensors(mark, dict(state), mark))


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """A tensor in a module's state that other ranks hold and write under the same name."""

    shape: tuple[int, ...]
    dtype: torch.dtype
