"""Search for a module's experts: those that it names, or layers whose parameters have one slice for each expert."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...common.errors import ConfigError, did_you_mean
from ...common.foreign import attribute_of
from ..tensor_parallel.brought_plans import Plan, brought_plans, matches_pattern
from .layer import CapacityLimit, Experts

_DISPATCHED: Final = "ep_dispatch_experts"
"""The word of a transformers plan for the layer that gets tokens, and the experts of each."""
_NUMBERS_OF_TOKEN: Final = ("top_k", "num_experts_per_tok")
_BIASES: Final = ("selection_bias", "e_score_correction_bias")
_INPUTS: Final = 3
"""What such a layer is called with: tokens, the experts of each, and their weights."""


def find_experts(module: nn.Module) -> dict[str, int]:
    """Return the layers of experts in a module, by name, each with the number of its experts.

    They are those of the module's attribute ``ep_plan``, or of its parts' (``ep_plan``, ``_ep_plan``, or their config's
    ``base_model_ep_plan``), that have the word ``"ep_dispatch_experts"``; without a plan, all layers whose parameters
    have the same first dimension, and one of them three dimensions. Each is called with tokens, the experts of each
    token, and the weights of these.

    Raises:
        ConfigError: for a module without such layers, a plan that matches none, and layers that cannot be dealt.
    """
    named = dict(_planned_layers(module)) or {
        name: layer for name, layer in module.named_modules() if _is_stacked(layer)
    }
    if not named:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in module.modules() if layer is not module})[:8])
        raise ConfigError(
            f"ep deals experts over ranks, but no layer of experts was found in {type(module).__name__}, which has "
            f"{kinds or 'no layers'}. A layer of experts has stacked parameters, whose first dimension is the number "
            "of experts, and is called with tokens, the experts of each, and their weights: use echelon.Experts, or "
            f"name yours in the module's attribute ep_plan = {{'name': {_DISPATCHED!r}}}; or leave ep out."
        )
    return {name: _count_experts(name, layer) for name, layer in named.items()}


def check_experts(module: nn.Module, ep: int) -> None:
    """Check, before processes start, that a module's experts can be dealt over `ep` ranks.

    Raises:
        ConfigError: as `find_experts`, and for a number of experts that `ep` does not divide.
    """
    found = find_experts(module)
    uneven = {name: number for name, number in found.items() if number % ep}
    if uneven:
        name, number = next(iter(uneven.items()))
        divisors = [each for each in range(2, number + 1) if all(n % each == 0 for n in found.values())]
        advice = f"choose one of {', '.join(map(str, divisors))}" if divisors else "leave ep out"
        raise ConfigError(f"ep={ep} does not divide the {number} experts of {name}; {advice}.")
    holders: dict[nn.Parameter, str] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        for own, parameter in layer.named_parameters(recurse=False):
            holders.setdefault(parameter, f"{name}.{own}") if name not in found else None
    for name in found:
        for own, parameter in module.get_submodule(name).named_parameters():
            if parameter in holders:
                raise ConfigError(
                    f"{name}.{own} is the same parameter as {holders[parameter]}, and ep={ep} would leave each rank a "
                    "part of it only; give the experts parameters of their own, or leave ep out."
                )


def experts_of_token(module: nn.Module, name: str) -> int:
    """Return how many experts a token has, as the layers beside those experts or the model's config say; else 2."""
    parents = [module.get_submodule(parent) for parent in _enclosing_names(name)]
    holders = [*parents[:1], *parents[0].children(), *(attribute_of(parent, "config") for parent in parents)]
    found = (attribute_of(holder, word) for holder in holders for word in _NUMBERS_OF_TOKEN)
    return next((number for number in found if type(number) is int and number > 0), 2)


def selection_bias_of(module: nn.Module, name: str) -> Tensor | None:
    """Return what the router beside a layer of experts adds to the scores with which it chooses; None for nothing."""
    parent = module.get_submodule(next(_enclosing_names(name)))
    found = (attribute_of(holder, word) for holder in (parent, *parent.children()) for word in _BIASES)
    return next((bias for bias in found if isinstance(bias, Tensor)), None)


def limit_of(module: nn.Module, name: str) -> CapacityLimit | None:
    """Return what chooses the tokens that a layer of experts takes; None if it takes all."""
    parent = module.get_submodule(next(_enclosing_names(name)))
    return parent.limit if isinstance(parent, Experts) else None


def load_of(module: nn.Module, name: str) -> Tensor | None:
    """Return the shares of experts of the last step's tokens, which the layer around them keeps; None for none."""
    parent = module.get_submodule(next(_enclosing_names(name)))
    return parent.load if isinstance(parent, Experts) and parent.returns_balance else None


def check_capacity(module: nn.Module, cp: int) -> None:
    """Check that a module whose sequences are cut over `cp` ranks has no experts that count the tokens of sequences.

    Raises:
        ConfigError: naming such a layer.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, Experts) and layer.limit is not None:
            raise ConfigError(
                f"cp={cp} leaves each rank a part of a sequence, but {name or type(module).__name__} has "
                f"capacity={layer.limit.capacity}, which counts the tokens of whole ones; leave capacity out, or cp."
            )


def _enclosing_names(name: str) -> Iterator[str]:
    """Yield the names of the modules around a layer, from the inside."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _planned_layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that plans name, those of the outermost parts that have a plan for experts."""
    for name, part, attribute, plan in brought_plans(module, "ep", counts=_is_for_experts):
        patterns = [str(pattern) for pattern, word in plan.items() if word == _DISPATCHED]
        yield from _matching_layers(part, name, patterns or [str(next(iter(plan)))], is_strict=attribute == "ep_plan")


def _is_for_experts(attribute: str, plan: Plan) -> bool:
    return attribute == "ep_plan" or _DISPATCHED in plan.values()


def _matching_layers(
    part: nn.Module, name: str, patterns: list[str], *, is_strict: bool
) -> Iterator[tuple[str, nn.Module]]:
    layers = dict(part.named_modules())
    for pattern in patterns:
        found = [own for own in layers if matches_pattern(own, pattern)]
        if is_strict and not found:
            raise ConfigError(
                f"ep_plan of {type(part).__name__} names {pattern!r}, which matches none of its layers."
                f"{did_you_mean(pattern, layers)}"
            )
        for own in found:
            yield f"{name}.{own}".strip("."), layers[own]


def _is_stacked(layer: nn.Module) -> bool:
    """Return whether a layer's own parameters look like stacked experts, and its forward like that of experts."""
    own = [parameter for parameter in layer.parameters(recurse=False) if not is_lazy(parameter)]
    lengths = {parameter.shape[0] for parameter in own if parameter.dim()}
    is_stack = len(lengths) == 1 and all(p.dim() > 1 for p in own) and any(p.dim() == 3 for p in own)
    return is_stack and min(lengths) > 1 and len(inputs_of(layer.forward)) == _INPUTS


def inputs_of(forward: Callable[..., object]) -> list[str]:
    """Return the names of the first inputs of a layer's forward that get its tokens, their experts, and weights."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in kinds][:_INPUTS]


def _count_experts(name: str, layer: nn.Module) -> int:
    """Return the number of experts of a layer.

    Raises:
        ConfigError: for a layer whose parameters, or whose forward, are not those of stacked experts.
    """
    shapes = {own: tuple(parameter.shape) for own, parameter in layer.named_parameters(recurse=False)}
    inner = [own for own, _ in layer.named_parameters() if own not in shapes]
    if inner:
        raise ConfigError(
            f"{name} is a layer of experts, but its {inner[0]} belongs to a layer inside it and is no stack of one "
            "slice for each expert, so that ep cannot deal it; put it outside of the experts, or leave ep out."
        )
    lengths = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise ConfigError(
            f"{name} is to be dealt by ep, but the first dimension of its parameters is not one number of experts: "
            f"{shapes}; stack them expert by expert, or take the layer out of ep_plan."
        )
    inputs = inputs_of(layer.forward)
    if len(inputs) < _INPUTS:
        raise ConfigError(
            f"{name} is to be dealt by ep, but its forward takes ({', '.join(inputs)}); it must take tokens, the "
            "experts of each token, and their weights, as the experts of transformers do, or leave ep out."
        )
    return int(lengths.pop())
