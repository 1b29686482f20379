"""Unplaced weights: what a fit in other processes has trained and the caller's module has no place for."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from ..strategies import Strategy
from ..strategies.state.dtensor import is_wrapper
from ..strategies.state.omitted_weights import note_changed
from .module.train_module import TrainModule

_MOST_NAMES: Final = 3


def load_trained(module: TrainModule, trained: Mapping[str, object]) -> str:
    """Load the weights that fit into the module, keep the others in its `unplaced_weights`, and return what to warn of.

    Layers that ``configure_model`` has built in the workers are built here as well. The module's own methods may raise
    anything: nothing is lost by it.
    """
    module.unplaced_weights = {}
    note_changed(module, _changed_names(nn.Module.state_dict(module), trained))
    raised = ""
    try:
        known = module.state_dict().keys()
        if known != trained.keys():
            module.configure_model()
            _convert_built(module, trained, known)
        module.load_state_dict(trained)
        return ""
    except Exception as error:  # noqa: BLE001 - see above
        raised = f"{type(error).__name__}: {error}"
    own = nn.Module.state_dict(module)
    fitting = {name: value for name, value in trained.items() if name in own and _can_load(own[name], value)}
    module.unplaced_weights = {name: value for name, value in trained.items() if name not in fitting}
    try:
        nn.Module.load_state_dict(module, fitting, strict=False)
        chosen = set(module.state_dict())
    except Exception as error:  # noqa: BLE001 - a hook of the module's
        raised, chosen = f"{type(error).__name__}: {error}", set(own)
        module.unplaced_weights = dict(trained)
    # what the module itself leaves out of its state is not missed
    untrained = [name for name in own if name in chosen and name not in trained] if module.strict_loading else []
    if not (module.unplaced_weights or untrained):
        return ""
    return _describe_loss(module, own, untrained, raised)


def _convert_built(module: nn.Module, trained: Mapping[str, object], known: Collection[str]) -> None:
    """Give what was built here the dtypes of what was trained: the workers have converted theirs to the precision."""
    for name, own in nn.Module.state_dict(module, keep_vars=True).items():
        value = trained.get(name)
        if name not in known and isinstance(own, Tensor) and isinstance(value, Tensor) and own.dtype != value.dtype:
            own.data = own.data.to(value.dtype)


def _changed_names(own: Mapping[str, object], trained: Mapping[str, object]) -> Iterator[str]:
    """Yield the names of the weights that the run has trained, or that only it has built."""
    for name, value in trained.items():
        here: object = own.get(name)
        if not isinstance(here, Tensor) or here.is_meta or is_wrapper(here) or not _is_same(here, value):
            yield name


def _is_same(here: Tensor, value: object) -> bool:
    return isinstance(value, Tensor) and here.shape == value.shape and torch.equal(here.cpu(), value.cpu())


def _can_load(own: object, trained: object) -> bool:
    if not isinstance(own, Tensor) or not isinstance(trained, Tensor):
        return isinstance(own, Tensor) == isinstance(trained, Tensor)
    return isinstance(own, nn.UninitializedParameter | nn.UninitializedBuffer) or own.shape == trained.shape


def _describe_loss(module: TrainModule, own: Mapping[str, object], untrained: list[str], raised: str) -> str:
    kind, parts = type(module).__name__, []
    if module.unplaced_weights:
        described = (_describe_weight(name, value, own.get(name)) for name, value in module.unplaced_weights.items())
        parts.append(f"has no place for {_list_first(described, len(module.unplaced_weights))}")
    if untrained:
        parts.append(f"keeps {_list_first(map(repr, untrained), len(untrained))} as they were before it")
    where = (
        "They are in module.unplaced_weights, and trainer.save_checkpoint(path, weights_only=True) saves all that was "
        "trained. "
        if module.unplaced_weights
        else ""
    )
    return (
        f"The module that this fit trained in its processes has other weights than {kind} has here, which "
        f"{' and '.join(parts)}. {where}Build the layers in __init__ or configure_model, or change the module here as "
        f"setup and the hooks did there and call module.load_state_dict(module.unplaced_weights, strict=False). "
        f"({raised.splitlines()[0]})"
    )


def _describe_weight(name: str, trained: object, own: object) -> str:
    if isinstance(own, Tensor) and isinstance(trained, Tensor) and own.shape != trained.shape:
        return f"{name!r} ({tuple(trained.shape)} there, {tuple(own.shape)} here)"
    return repr(name)


def _list_first(names: Iterable[str], number: int) -> str:
    first = [name for name, _ in zip(names, range(_MOST_NAMES), strict=False)]
    return f"{', '.join(first)}{f' and {number - len(first)} more' if number > len(first) else ''}"


def trained_weights(module: TrainModule, names: Iterable[str] | None) -> dict[str, object]:
    """Return the module's weights with those unplaced; with `names`, only these, which the fit has trained."""
    weights = {**module.state_dict(), **module.unplaced_weights}
    return weights if names is None else {name: weights[name] for name in names if name in weights}


def forget_placed(module: TrainModule) -> None:
    """Forget the unplaced weights that the user has made a place for since."""
    if module.unplaced_weights:
        own = nn.Module.state_dict(module)
        rest = {name: value for name, value in module.unplaced_weights.items() if not _has_place(own, name, value)}
        module.unplaced_weights = rest


def place_weights(module: TrainModule, strategy: Strategy) -> None:
    """Load the unplaced weights for which this run's ``setup`` or ``configure_model`` has built layers.

    Collective: every rank calls it.
    """
    if not module.unplaced_weights:
        return
    own = nn.Module.state_dict(module)
    found = {name: value for name, value in module.unplaced_weights.items() if _has_place(own, name, value)}
    if found:
        strategy.load_model_state(found, strict=False)
    module.unplaced_weights = {name: value for name, value in module.unplaced_weights.items() if name not in found}
    if module.unplaced_weights and strategy.rank == 0:
        names = _list_first(map(repr, module.unplaced_weights), len(module.unplaced_weights))
        warnings.warn(
            f"{type(module).__name__} runs without {names}, which its last fit has trained and it has no place for; "
            "they are in module.unplaced_weights.",
            stacklevel=2,
        )


def _has_place(own: Mapping[str, object], name: str, value: object) -> bool:
    return name in own and _can_load(own[name], value)
