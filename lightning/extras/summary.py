"""SummaryOf: the summary of a module as Lightning's object has it, with the module's state when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from ...callbacks.model_summary import LayerSummary, Summary, format_count, summarize

__all__ = ["LEFTOVER_PARAMS_NAME", "NOT_APPLICABLE", "SummaryOf", "get_human_readable_count", "summary_of"]

LEFTOVER_PARAMS_NAME: Final = "other params"
"""The row of the parameters that belong to the module itself."""
NOT_APPLICABLE: Final = "n/a"
"""What that row shows where it has no value."""


class SummaryOf(Summary):
    """The summary of a module, made from the module itself.

    Args:
        model: the module.
        max_depth: the levels of submodules that are shown; -1 for all.
    """

    def __init__(self, model: torch.nn.Module, max_depth: int = 1) -> None:
        super().__init__(**vars(summarize(model, max_depth)))
        object.__setattr__(self, "_of", (model, max_depth))

    def summarize(self) -> Mapping[str, LayerSummary]:
        """Return the summary of each submodule as it is now, by name."""
        model, max_depth = self.__dict__["_of"]
        return {layer.name: layer for layer in summarize(model, max_depth).named_layers}

    @property
    def max_depth(self) -> int:
        """The levels of submodules that are shown."""
        depth: int = self.__dict__["_of"][1]
        return depth

    @property
    def total_training_modes(self) -> dict[str, int]:
        """The number of submodules that are in ``train`` and in ``eval`` mode now."""
        model = self.__dict__["_of"][0]
        modes = [part.training for part in model.modules() if part is not model]
        return {"train": sum(modes), "eval": len(modes) - sum(modes)}

    @property
    def total_layer_params(self) -> int:
        """The parameters of the submodules that are shown, without the module's own."""
        return sum(self.param_nums)

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        """Return the columns of the table, which programs print in their own way."""
        layers = self.named_layers
        columns = {
            " ": [str(index) for index in range(len(layers))],
            "Name": self.layer_names,
            "Type": self.layer_types,
            "Params": [get_human_readable_count(number) for number in self.param_nums],
            "Mode": ["train" if is_training else "eval" for is_training in self.training_modes],
            "FLOPs": [NOT_APPLICABLE] * len(layers),
        }
        if any(layer.out_size is not None for layer in layers):
            columns["In sizes"] = [str(size) for size in self.in_sizes]
            columns["Out sizes"] = [str(size) for size in self.out_sizes]
        own = next((layer.parameters for layer in self.layers if layer not in layers), None)
        if own is not None:
            row = {" ": " ", "Name": LEFTOVER_PARAMS_NAME, "Params": get_human_readable_count(own)}
            for title, entries in columns.items():
                entries.append(row.get(title, NOT_APPLICABLE))
        return list(columns.items())


def summary_of(lightning_module: torch.nn.Module, max_depth: int = 1) -> SummaryOf:
    """Return the summary of a module.

    Raises:
        ConfigError: unless the depth is an integer >= -1.
    """
    return SummaryOf(lightning_module, max_depth)


def get_human_readable_count(number: int) -> str:
    """Return a number with a unit: ``1.2 K``.

    Raises:
        ValueError: for a negative number.
    """
    if number < 0:
        raise ValueError(f"number must be 0 or more, got {number}.")
    return format_count(number)
