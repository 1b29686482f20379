"""Positions for models of transformers, which count the tokens of a part of a sequence from 0 where none are given."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .context import ContextParallel


class GivesPositions:
    """A hook before a model's forward that adds the positions of this rank's part, and a mask that masks nothing.

    Without a mask and a cache, such a model would take a part of which positions do not follow each other for several
    sequences in one row.

    Args:
        context: knows whether a part runs, and which.
        model: the model.
    """

    def __init__(self, context: ContextParallel, model: nn.Module) -> None:
        self._context: ContextParallel | None = context
        self._signature = inspect.signature(model.forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> GivesPositions:
        return self  # a copy of the module trains in the same processes

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_context": None}  # where the module is unpickled, there are no parts

    def __call__(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        context = self._context
        if context is None or not context.is_cut:
            return None
        given = self._signature.bind_partial(*args, **kwargs).arguments
        given = {**given, **given.get("kwargs", {})}
        inputs = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if not isinstance(inputs, Tensor) or inputs.ndim < 2:
            return None
        own = context.positions(inputs.shape[1], inputs.device)[None]
        positions = given.get("position_ids")
        if positions is not None and not torch.equal(positions, own.expand_as(positions)):
            return None
        added = {} if positions is not None else {"position_ids": own}
        if "attention_mask" in self._signature.parameters and given.get("attention_mask") is None:
            added["attention_mask"] = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
        return args, {**kwargs, **added}


def give_positions(module: nn.Module, context: ContextParallel) -> list[RemovableHandle]:
    """Let every model of transformers in a module that takes positions get those of its part of a sequence."""
    handles = []
    for part in module.modules():
        is_model = any(
            (kind.__module__, kind.__name__) == ("transformers.modeling_utils", "PreTrainedModel")
            for kind in type(part).__mro__
        )
        if is_model and "position_ids" in inspect.signature(part.forward).parameters:
            handles.append(part.register_forward_pre_hook(GivesPositions(context, part), with_kwargs=True))
    return handles
