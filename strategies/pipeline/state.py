"""State of a module in stages: each rank has the state of its own stages, under the names of the whole module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..distributed.collectives import Collectives
from ..state.dtensor import is_dtensor, whole_on_cpu, whole_tensor
from ..state.optimizer_state import Elsewhere, Sharded
from .pipeline import Pipeline


def add_placeholders(pipeline: Pipeline, state: Mapping[str, object]) -> dict[str, object]:
    """Return a module's state with placeholders for the parameters that other ranks of the pipeline write."""
    parameters = dict(pipeline.module.named_parameters(remove_duplicate=False))
    marks: dict[Tensor, Elsewhere] = {}  # one for all names of a parameter

    def mark(name: str) -> Elsewhere | Tensor:
        parameter = parameters[name]
        if not parameter.numel():  # it is not sharded, and so nobody else writes it
            return torch.empty(parameter.shape, dtype=parameter.dtype)
        return marks.setdefault(parameter, Elsewhere(tuple(parameter.shape), parameter.dtype))

    return {
        name: mark(name) if name in pipeline.ranks_of and not pipeline.owns(name) else value
        for name, value in state.items()
    }


def own_entries(pipeline: Pipeline, state: Mapping[str, Any], peers: Collectives) -> dict[str, object]:
    """Return an optimizer's state with the entries that this rank of the pipeline writes.

    Args:
        pipeline: the stages.
        state: the optimizer's, by name.
        peers: of the ranks that hold the same stages; the first of them writes what is not a DTensor.
    """
    entries = Sharded({name: value for name, value in state["state"].items() if pipeline.owns(name)})
    entries.is_owner = peers.rank == 0
    owners = {pipeline.rank, *(ranks[0] for _, _, ranks in pipeline.shared())}
    number = peers.world_size  # pp is the outermost axis
    entries.sources = [owner * number + peer for owner in sorted(owners) for peer in range(number)]
    return {**state, "state": entries}


def without_elsewhere(pipeline: Pipeline, state: Mapping[str, Any]) -> dict[str, object]:
    """Return a module's state to be loaded, with tensors of other ranks reduced to their shapes."""
    lacking = {name for name, p in pipeline.module.named_parameters(remove_duplicate=False) if p in pipeline.elsewhere}
    return {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") if name in lacking else value
        for name, value in state.items()
    }


def keep_own_entries(pipeline: Pipeline, entries: Mapping[str, object]) -> dict[str, object]:
    """Return the entries of an optimizer's state for the parameters that this rank holds."""
    lacking = {name for name, parameter in pipeline.module.named_parameters() if parameter in pipeline.elsewhere}
    return {name: values for name, values in entries.items() if name not in lacking}


def gather_all(pipeline: Pipeline, collectives: Collectives, *, is_kept: bool) -> dict[str, object]:
    """Return the whole state of a module on the CPU; empty on ranks where it is not kept. Collective: all ranks.

    One tensor at a time is whole on the ranks that do not keep it.
    """
    ranks_a_stage = collectives.world_size // pipeline.schedule.num_ranks
    whole: dict[str, object] = {}
    for name, value in pipeline.module.state_dict().items():
        if name in pipeline.ranks_of:
            first = pipeline.ranks_of[name][0]
            own = None
            if pipeline.rank == first:  # what has no element is plain
                own = (whole_tensor(value) if is_dtensor(value) else value).detach().cpu()
            value = collectives.broadcast(own, first * ranks_a_stage)
        elif is_dtensor(value):
            value = whole_tensor(value)
        if is_kept:
            whole[name] = value.detach().cpu() if isinstance(value, Tensor) else value
    return whole


def whole_of_stages(pipeline: Pipeline, tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return copies of the parameters, or gradients, of all stages on every rank, by name. Collective: all ranks."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        first = pipeline.ranks_of[name][0]
        own = whole_on_cpu({name: tensor}) if pipeline.rank == first else None
        whole |= pipeline.collectives.broadcast(own, first)
    return whole
