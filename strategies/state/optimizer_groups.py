"""Parameter groups of a saved optimizer, matched with those of another one by the names of their parameters."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from enum import Enum
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from ...common.errors import CheckpointError
from .schema import NUMBER, check_schema

UNNAMED: Final = "unnamed."
"""The beginning of the names of parameters that do not belong to the module; their position follows."""

Group = Mapping[str, Any]
Sources = Sequence[int | None]
"""For each group of an optimizer, the saved group from which it takes its settings; None if it has no parameters."""

_NO_SETTINGS: Final = frozenset({"params", "param_names"})


def match_groups(saved: Sequence[Group], here: Sequence[Sequence[str]]) -> Sources:
    """Return the saved group of each group of an optimizer, whose parameters have these names.

    Groups may have been reordered, split, and merged with others of the same settings.

    Raises:
        CheckpointError: for a group with parameters of saved groups that had different settings.
    """
    if [list(group["params"]) for group in saved] == [list(names) for names in here]:
        return range(len(saved))
    unnamed = [name for names in here for name in names if name.startswith(UNNAMED)]
    if unnamed and [set(group["params"]) for group in saved] != [set(names) for names in here]:
        raise CheckpointError(
            f"The optimizer has parameters that are not the module's ({unnamed[:3]}), and other groups than the saved "
            f"one, got {[len(names) for names in here]} parameters by group for "
            f"{[len(group['params']) for group in saved]}; make them parameters of the module, which have names, or "
            "configure the groups as they were saved."
        )
    home = {name: index for index, group in enumerate(saved) for name in group["params"]}
    sources: list[int | None] = []
    for index, names in enumerate(here):
        first_of = {home[name]: name for name in reversed(names)}
        homes = sorted(first_of)
        for other in homes[1:]:
            _check_same(index, (saved[homes[0]], first_of[homes[0]]), (saved[other], first_of[other]))
        sources.append(homes[0] if homes else None)
    return sources


def _check_same(index: int, one: tuple[Group, str], other: tuple[Group, str]) -> None:
    for setting in sorted((one[0].keys() | other[0].keys()) - _NO_SETTINGS):
        values = one[0].get(setting), other[0].get(setting)
        if not _is_equal(*values):
            raise CheckpointError(
                f"Group {index} of the optimizer has {one[1]} and {other[1]}, which had another {setting} each when "
                f"they were saved: {values[0]!r:.80} and {values[1]!r:.80}; configure the groups as they were saved, "
                "or load the weights only (echelon.load_weights)."
            )


def _is_equal(one: object, other: object) -> bool:
    equal = one == other
    return bool(equal.all() if isinstance(equal, Tensor) else equal)


def taken_over(optimizer: Optimizer, here: Sequence[Group], saved: Sequence[Group], sources: Sources) -> list[Group]:
    """Return the groups of an optimizer, with the parameters that they have `here`, and the saved settings.

    Raises:
        CheckpointError: for settings of another kind of optimizer, or that are not numbers where it has numbers.
    """
    groups: list[Group] = []
    for index, (group, source) in enumerate(zip(here, sources, strict=True)):
        settings = {} if source is None else {k: v for k, v in saved[source].items() if k not in _NO_SETTINGS}
        if source is not None:
            _check_kind(optimizer, settings, group)
        for name in settings.keys() & group.keys():
            _check_setting(settings[name], group[name], f"{name} of group {index} in the optimizer state")
        groups.append({**group, **settings})
    return groups


def settings_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return the settings of parameter groups that are values, such as learning rates."""
    kinds = (int, float, str, tuple, Tensor, type(None))
    settings = ({k: v for k, v in group.items() if k not in _NO_SETTINGS} for group in groups)
    return [{k: v for k, v in each.items() if isinstance(v, kinds)} for each in settings]


def set_settings(groups: Sequence[MutableMapping[str, Any]], settings: Sequence[Group]) -> None:
    """Give parameter groups other settings; a tensor stays the same one, which a captured step may read."""
    for group, given in zip(groups, settings, strict=True):
        for name, value in given.items():
            own = group.get(name)
            if isinstance(own, Tensor):
                own.fill_(value)
            elif value is not own:
                group[name] = value


def _check_kind(optimizer: Optimizer, saved: Group, here: Group) -> None:
    """Reject the state of another kind of optimizer, which would cause a KeyError in the next step."""
    # loading fills in settings that newer versions of torch have added; only both together mean another kind
    lacking, unknown = sorted(optimizer.defaults.keys() - saved.keys()), sorted(saved.keys() - here.keys())
    if lacking and unknown:
        raise CheckpointError(
            f"The optimizer is {type(optimizer).__name__} with {lacking}, the saved one had {unknown} instead; "
            "configure the optimizer as it was saved, or load the weights only (echelon.load_weights)."
        )


def _check_setting(saved: Any, here: object, place: str) -> None:
    """Reject settings that are not numbers where this optimizer has numbers."""
    if isinstance(here, tuple):
        check_schema(saved, [object], place)
        if len(saved) != len(here):
            raise CheckpointError(f"{place} must have {len(here)} items, got {len(saved)}; use another checkpoint.")
        for index, (item, own) in enumerate(zip(saved, here, strict=True)):
            # None stands for a value that the optimizer computes: one run may give it, and another may not
            if item is not None and own is not None:
                _check_setting(item, own, f"{place}[{index}]")
    elif isinstance(here, int | float | Tensor) and not isinstance(here, bool | Enum):
        check_schema(saved, (NUMBER, Tensor), place)
